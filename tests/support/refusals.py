"""What every refusal must be: an error of the very kind, with words that name what is wrong and what to do next."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mtpconvert.errors import MtpConvertError


def refusal(action: Callable[[], object], kind: type[MtpConvertError], *words: str) -> str:
    """The whole message of the refusal of ``action``, which has all of ``words``."""
    with pytest.raises(MtpConvertError) as caught:
        action()
    assert type(caught.value) is kind
    message = str(caught.value)
    for word in words:
        assert word in message
    assert caught.value.next_step
    return message
