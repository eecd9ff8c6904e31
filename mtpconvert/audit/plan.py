"""What to compare, and what already differs by name, shape or dtype: no byte is read here."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtpconvert.audit.compose import Holders, compose, elect, holders_of, key_of, role_words, uncovered
from mtpconvert.audit.describe import Description
from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.mtp import MtpLayers
from mtpconvert.audit.pairs import Pair
from mtpconvert.audit.readers.side import Side, same_tensors
from mtpconvert.audit.roles.algebra import Placement
from mtpconvert.errors import some
from mtpconvert.tensors import Inventory, whole


@dataclass(slots=True)
class Plan:
    """``matched``: tensors of the left that something of the right answers to. ``missing``/``unexpected``: names on
    the left/right without an answer; they become findings once bytes have been looked at (a rename is found so)."""

    common: list[str] = field(default_factory=list)  # same name and shape on both sides
    pairs: list[Pair] = field(default_factory=list)  # everything else: through meanings, and copies within a side
    padding: list[Placement] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    optional: dict[str, str] = field(default_factory=dict)
    matched: set[str] = field(default_factory=set)

    def all_pairs(self, left: Side) -> list[Pair]:
        """``pairs``, and every common tensor against its namesake."""
        return [Pair(block := whole(name, left.inventory[name].shape), block) for name in self.common] + self.pairs


def make_plan(left: Side, right: Side, describe_left: Description, describe_right: Description) -> Plan:
    plan = Plan()
    for side, description in ((left, describe_left), (right, describe_right)):
        if description.contradiction:
            text = f"{'config.json' if side.is_huggingface else 'the arguments'}: {description.why_not}"
            plan.findings.append(finding("config-contradiction", text, side=side.label))
    if left.kind == right.kind:
        _same_framework(plan, left, right, describe_left, describe_right)
    elif not describe_left.known or not describe_right.known:
        for side, description in ((left, describe_left), (right, describe_right)):
            if not description.known:
                text = f"the meanings of the {side.label} side are not known: {description.why_not}"
                plan.findings.append(finding("architecture-unknown", text, side=side.label))
    else:
        plan.findings += describe_left.findings + describe_right.findings
        _through_roles(plan, left, right, describe_left, describe_right)
    return plan


def _same_framework(plan: Plan, left: Side, right: Side, one: Description, two: Description) -> None:
    here, there = left.inventory, right.inventory
    broken = left.broken | right.broken
    if same_tensors(left, right):
        plan.matched.update(here)
        plan.common = [name for name in here if name not in broken] if broken else list(here)
    else:
        _by_name(plan, here, there, broken)
    if (plan.missing or plan.unexpected) and one.known and two.known:
        _other_layouts(plan, one, two)
    for description, side in ((one, left), (two, right)):
        if description.known:
            _copies_within(description, side.label, plan)
            plan.findings += [fault for fault in description.findings if fault.code == "role-overlap"]
            plan.findings += _incomplete(description, side.label, set(plan.missing) if side is right else set())
        else:
            plan.pairs += _tie_by_name(side)


def _by_name(plan: Plan, here: Inventory, there: Inventory, broken: set[str]) -> None:
    for name, spec in here.items():
        other = there.get(name)
        if other is None:
            plan.missing.append(name)
            continue
        plan.matched.add(name)
        if spec.shape != other.shape:
            text = f"{name}: {list(spec.shape)} on the left, {list(other.shape)} on the right"
            turned = "; transposed" if spec.shape == other.shape[::-1] else ""
            plan.findings.append(finding("shape-mismatch", text + turned, side="both", tensor=name))
        elif name not in broken:
            plan.common.append(name)
    plan.unexpected = [name for name in there if name not in here]


def _tie_by_name(side: Side) -> list[Pair]:
    """Of an architecture that is not known: a stored head against the embedding, where the config ties them."""
    config = side.config or {}
    levels = [config, *(value for value in config.values() if isinstance(value, dict))]
    if not any(level.get("tie_word_embeddings") is True for level in levels):
        return []
    heads = [name for name in side.inventory if name.endswith("lm_head.weight")]
    tables = [name for name in side.inventory if name.endswith(("embed_tokens.weight", "word_embeddings.weight"))]
    trunk = sorted(tables, key=lambda name: ("mtp" in name, name.count("."), name))[:1]
    return [
        Pair(whole(table, side.inventory[table].shape), whole(head, side.inventory[head].shape), copy=side.label)
        for table in trunk
        for head in heads
        if side.inventory[head].shape == side.inventory[table].shape and not {head, table} & side.broken
    ]


def _incomplete(description: Description, label: str, known: set[str]) -> list[Finding]:
    """What a side's own config calls for and the side does not have; ``known``: reported already, as missing."""
    if not description.absent:
        return []
    held = holders_of(description.usable)
    absent = [p for p in description.absent if key_of(p.role) not in held and p.block.tensor not in known]
    found: list[Finding] = []
    layers: dict[str, list[str]] = {}
    for placement in absent:
        layers.setdefault(placement.role.place, []).append(placement.block.tensor)
    there = {place for place, _ in held}
    for place, names in layers.items():
        names = list(dict.fromkeys(names))
        if place.startswith("mtp."):
            if place in there:
                text = f"MTP layer {place[4:]} lacks {len(names)} tensors that the config calls for: {some(names)}"
                found.append(
                    finding("mtp-layer-incomplete", text, side=label, tensor=names[0], mtp=True, count=len(names))
                )
            continue
        for name in names:
            text = f"{name} is not there, and the config calls for it"
            found.append(finding("tensor-missing", text, side=label, tensor=name))
    return found


def _other_layouts(plan: Plan, one: Description, two: Description) -> None:
    """Tensors without a namesake may hold the same meanings in another layout (experts stacked or one by one)."""
    lost, surplus = set(plan.missing), set(plan.unexpected)
    left, right = holders_of(one.usable), holders_of(two.usable)
    pairs: list[Pair] = []
    answered: dict[str, bool] = {}
    for key, group in left.items():
        if not any(placement.block.tensor in lost for placement in group):
            continue
        others = [p for p in right.get(key, []) if p.block.tensor in surplus]
        mine = [p for p in group if p.block.tensor in lost]
        for placement in mine:
            if placement.copy:
                plan.optional[placement.block.tensor] = role_words(placement.role)
            done = not uncovered([placement], others) and bool(others)
            name = placement.block.tensor
            answered[name] = answered.get(name, True) and done
        for placement in others:
            answered.setdefault(placement.block.tensor, True)
        if others:
            pairs += compose(mine, others)
    plan.pairs += [p for p in pairs if answered.get(p.left.tensor) and answered.get(p.right.tensor)]
    plan.missing = [name for name in plan.missing if not answered.get(name)]
    used = {p.right.tensor for p in plan.pairs}
    plan.matched |= {p.left.tensor for p in plan.pairs}
    plan.unexpected = [name for name in plan.unexpected if name not in used]


def _copies_within(description: Description, side: str, plan: Plan) -> None:
    """Copies and ties of the embedding and the head, against what they repeat on the same side."""
    for group in holders_of([p for p in description.usable if p.role.name in ("embedding", "head")]).values():
        plan.pairs += elect(group, side)[1]


def _through_roles(plan: Plan, left: Side, right: Side, one: Description, two: Description) -> None:
    here, there = holders_of(one.usable), holders_of(two.usable)
    absent_here, absent_there = holders_of(one.absent), holders_of(two.absent)
    for holders in (here, there):
        for key in [key for key in holders if key[1] == "padding"]:
            plan.padding += holders.pop(key)
    _shapes(plan, here, there)
    for key in sorted(here.keys() | there.keys() | absent_here.keys() | absent_there.keys()):
        mine, copies = elect(here.get(key, []), "left")
        theirs, replicas = elect(there.get(key, []), "right")
        plan.pairs += copies + replicas + compose(mine, theirs)
        plan.matched |= {p.block.tensor for p in mine if theirs}
        if mine and uncovered(mine, theirs):
            names = [p.block.tensor for p in absent_there.get(key, [])] or [f"({role_words(mine[0].role)})"]
            plan.missing += [name for name in dict.fromkeys(names) if name not in plan.missing]
        elif theirs and uncovered(theirs, mine):
            names = [p.block.tensor for p in absent_here.get(key, [])]
            for name in dict.fromkeys(names):
                text = f"{name} is not there, the right side has {theirs[0].block.tensor}"
                plan.findings.append(_lacking(key[0], text, "left", name))
            if not names:
                plan.unexpected += [n for n in {p.block.tensor for p in theirs} if n not in plan.unexpected]
        elif not mine and not theirs:
            for side, lacking in ((left, absent_here), (right, absent_there)):
                for name in {p.block.tensor for p in lacking.get(key, [])}:
                    text = f"{name}: its config calls for it, and neither side has it"
                    plan.findings.append(_lacking(key[0], text, side.label, name))
    described = {f.tensor for f in (one.findings + two.findings) if f.tensor}
    plan.unexpected = [name for name in plan.unexpected if name not in described]


def _lacking(place: str, text: str, side: str, name: str) -> Finding:
    if place.startswith("mtp."):
        return finding("mtp-tensor-missing", text, side=side, tensor=name, mtp=True)
    return finding("tensor-missing", text, side=side, tensor=name)


def _shapes(plan: Plan, here: Holders, there: Holders) -> None:
    """One role of two sizes: a shape mismatch. Reported once, and left out of the comparison."""
    for key in here.keys() & there.keys():
        mine, theirs = here[key][0], there[key][0]
        if mine.role.shape != theirs.role.shape:
            text = (
                f"{role_words(mine.role)}: {list(mine.role.shape)} in {mine.block.tensor} on the left, "
                f"{list(theirs.role.shape)} in {theirs.block.tensor} on the right"
            )
            plan.findings.append(finding("shape-mismatch", text, side="both", tensor=theirs.block.tensor))
            here[key] = there[key] = []


def missing_findings(plan: Plan, left: Side, right: Side, mtp_left: MtpLayers, mtp_right: MtpLayers) -> list[Finding]:
    """The names without an answer, as findings: MTP apart, lost copies as what they are."""
    found: list[Finding] = []
    mtp_names, mtp_extra = mtp_left.all_names(), mtp_right.all_names()
    for name in plan.missing:
        is_mtp = name in mtp_names or name.startswith(("mtp.", "(mtp")) or " of MTP layer " in name
        code = "mtp-tensor-missing" if is_mtp else "tensor-missing"
        text = f"{name} is not on the right"
        if name in plan.optional:
            text += f"; it repeats the {plan.optional[name]}, so no numbers are lost, but the file is not the same"
        found.append(finding(code, text, side="right", tensor=name, mtp=is_mtp or None))
    for name in plan.unexpected:
        code = "mtp-tensor-unexpected" if name in mtp_extra else "tensor-unexpected"
        found.append(finding(code, f"{name} is on the right and not on the left", side="right", tensor=name))
    return found
