"""Everything that can stop a command, as one tree; each class carries the exit code that scripts rely on.

    MtpConvertError
    ├── AuditFailedError          1   the auditor found something in what was just converted
    ├── UsageError                2   wrong usage; also: the target exists
    ├── MappingError              3   a mapping file is wrong
    │   └── NotABijectionError    4   its expansion does not cover both sides exactly once
    ├── ConfigError               5   config.json or Megatron arguments: missing, contradictory, of unknown meaning
    ├── CheckpointError           6   unreadable or refused checkpoint
    │   └── IncompleteError       7   a file or a tensor's bytes are missing
    ├── UnmappedTensorError       8   a tensor that nothing maps, or that a row needs and is not there
    ├── MtpLostError              9   MTP layers would be lost or invented
    ├── NotRepresentableError    10   the other side has no place for it
    │   └── NotRunError          10   evidence that was asked for and could not be had; never a pass
    └── TargetError              11   the target cannot be written: no space, no permission, a failing disk

A finding of the auditor is a value; only a conversion that must not be published turns findings into an exception.
"""


class MtpConvertError(Exception):
    """``what`` went wrong, ``where`` (tensor, file, config key) and the ``next_step`` for a person to take.

    ``usual_next_step``: where nothing more particular can be said.
    """

    exit_code = 2
    usual_next_step: str | None = None

    def __init__(self, what: str, *, where: str | None = None, next_step: str | None = None) -> None:
        self.what = what
        self.where = where
        self.next_step = next_step or self.usual_next_step
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where is not None:
            lines.append(f"  where: {self.where}")
        if self.next_step is not None:
            lines.append(f"  next:  {self.next_step}")
        return "\n".join(lines)


class AuditFailedError(MtpConvertError):
    exit_code = 1


class UsageError(MtpConvertError):
    exit_code = 2


class MappingError(MtpConvertError):
    exit_code = 3
    usual_next_step = "correct the mapping file; docs/mapping-format.md says what it may hold"


class NotABijectionError(MappingError):
    exit_code = 4


class ConfigError(MtpConvertError):
    exit_code = 5
    usual_next_step = "correct config.json, or fetch it again"


class CheckpointError(MtpConvertError):
    exit_code = 6
    usual_next_step = "fetch or copy the file again; if it stays so, the save was damaged: take another one"


class IncompleteError(CheckpointError):
    exit_code = 7


class UnmappedTensorError(MtpConvertError):
    exit_code = 8


class MtpLostError(MtpConvertError):
    exit_code = 9


class NotRepresentableError(MtpConvertError):
    exit_code = 10


class NotRunError(NotRepresentableError):
    exit_code = 10


class TargetError(MtpConvertError):
    exit_code = 11


def some(names: list[str], limit: int = 5) -> str:
    """The first ``limit`` of ``names`` for a message, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
