"""The HF half of the roles means what it says: numbers that it names are changed, and the real forward is watched.

Each test edits the stored tensors through the placements, lets transformers load them, and looks at what reaches the
attention function (queries, keys, values after rotary), at a module's input or output, or at the logits.
"""

import pytest
import torch

from tests.support.hf_probe import ALL, IDS, MtpProbe, Probe, Seen, negated, only, same
from tests.support.hf_roles import MLA

GQA_CASES = ["llama", "llama, head_dim and every bias", "mistral", "qwen2", "qwen3", "qwen3, tied, biased"]
MLA_CASES = ["deepseek", "deepseek, plain queries, no MTP", "deepseek, rotary halves"]
HEADS, KV_HEADS = 6, 3
NOPE, ROPE = MLA["qk_nope_head_dim"], MLA["qk_rope_head_dim"]


@pytest.mark.parametrize("case", GQA_CASES)
def test_query_key_value_heads(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(case, monkeypatch)
    plain = probe.plain

    seen = probe.zero("attn.q", "attn.q.bias", where=4)
    assert only(seen.query[0], plain.query[0], (0, 4))
    assert same(seen.key[0], plain.key[0])
    assert same(seen.value[0], plain.value[0])

    seen = probe.zero("attn.k", "attn.k.bias", where=1)
    assert only(seen.key[0], plain.key[0], (0, 1))
    assert same(seen.query[0], plain.query[0])
    assert same(seen.value[0], plain.value[0])

    seen = probe.zero("attn.v", "attn.v.bias", where=1)
    assert only(seen.value[0], plain.value[0], (0, 1))
    assert same(seen.query[0], plain.query[0])
    assert same(seen.key[0], plain.key[0])
    readers = [h for h in range(HEADS) if h // (HEADS // KV_HEADS) == 1]
    assert only(seen.attended[0], plain.attended[0], (0, ALL, readers))


@pytest.mark.parametrize("case", ["llama, head_dim and every bias", "mistral", "qwen2"])
def test_query_dims_and_columns(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At position 0 the rotary embedding turns nothing, so a dim can be told from its partner."""
    probe = Probe(case, monkeypatch)
    for role, trace in (("attn.q", "query"), ("attn.k", "key"), ("attn.v", "value")):
        seen = probe.zero(role, f"{role}.bias", where=(2, 3))
        assert only(getattr(seen, trace)[0][:, :, 0], getattr(probe.plain, trace)[0][:, :, 0], (0, 2, 3))
    seen = probe.after(("", "embedding", (IDS[0, 1:], ALL)), ("", "embedding", (3, slice(1, None))))
    normed = seen.inputs["model.layers.0.self_attn"]
    assert normed[0, 0, 0] != 0
    assert not normed[0, 0, 1:].any()  # token 3, the first, now has column 0 alone
    blind = probe.after(
        ("", "embedding", (IDS[0, 1:], ALL)), ("", "embedding", (3, slice(1, None))), ("trunk.0", "attn.q", (2, ALL, 0))
    )
    changed = (seen.query[0] != blind.query[0]).nonzero()
    assert {int(head) for _, head, _, _ in changed} == {2}
    assert {int(position) for *_, position, _ in changed} == {0}


@pytest.mark.parametrize("case", ["llama, head_dim and every bias", "qwen2"])
def test_biases_of_queries_keys_values_and_output(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(case, monkeypatch)
    for role, trace in (("attn.q", "query"), ("attn.k", "key"), ("attn.v", "value")):
        reached = getattr(probe.zero(role, where=ALL), trace)[0][0, :, 0]
        halved = getattr(
            probe.after(("trunk.0", role, ALL), ("trunk.0", f"{role}.bias", (1, 2), lambda x: x / 2)), trace
        )[0][0, :, 0]
        assert reached.any()
        assert (reached != halved).nonzero().tolist() == [[1, 2]]
    if probe.has("attn.out.bias"):
        out = probe.after(("trunk.0", "attn.out", ALL), ("trunk.0", "attn.out.bias", 5))
        assert (out.outputs["model.layers.0.self_attn"][0] == 0).nonzero()[:, 2].unique().tolist() == [5]


@pytest.mark.parametrize("case", ["qwen3", "qwen3, tied, biased"])
def test_norms_of_query_and_key_heads(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(case, monkeypatch)
    seen = probe.zero("attn.q_norm", where=3)
    assert only(seen.query[0][:, :, 0], probe.plain.query[0][:, :, 0], (0, ALL, 3))
    assert same(seen.key[0], probe.plain.key[0])
    seen = probe.zero("attn.k_norm", where=3)
    assert only(seen.key[0][:, :, 0], probe.plain.key[0][:, :, 0], (0, ALL, 3))
    assert same(seen.query[0], probe.plain.query[0])


@pytest.mark.parametrize("case", [*GQA_CASES, *MLA_CASES])
def test_output_projection_by_row_and_head(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(case, monkeypatch)
    attended = probe.plain.attended[0].clone()
    attended[:, :, 2] = 0
    stored = probe.tensors["model.layers.0.self_attn.o_proj.weight"]
    bias = probe.tensors.get("model.layers.0.self_attn.o_proj.bias")
    expected = torch.nn.functional.linear(attended.flatten(2), stored, bias)
    out = probe.zero("attn.out", where=(ALL, 2)).outputs["model.layers.0.self_attn"][0]
    assert same(out, expected)
    out = probe.zero("attn.out", "attn.out.bias", where=7).outputs["model.layers.0.self_attn"][0]
    assert only(out, probe.plain.outputs["model.layers.0.self_attn"][0], (0, ALL, 7))


@pytest.mark.parametrize("case", MLA_CASES)
def test_latent_queries(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(case, monkeypatch)
    plain = probe.plain
    role = "mla.q" if probe.has("mla.q.nope") else "mla.q_up"
    assert only(probe.zero(f"{role}.nope", where=1).query[0], plain.query[0], (0, 1, ALL, slice(0, NOPE)))
    assert only(probe.zero(f"{role}.rope", where=1).query[0], plain.query[0], (0, 1, ALL, slice(NOPE, None)))
    assert only(probe.zero(f"{role}.nope", where=(2, 4)).query[0], plain.query[0], (0, 2, ALL, 4))
    if role == "mla.q_up":
        for part in ("mla.q_down", "mla.q_down_norm"):
            assert not probe.zero(part, where=ALL).query[0].any()
        without_norm = probe.zero("mla.q_down_norm", where=3)
        assert same(without_norm.query[0], probe.zero("mla.q_up.nope", "mla.q_up.rope", where=(ALL, ALL, 3)).query[0])
        # the rank's row, not its scale, also enters the norm of the others
        assert not same(without_norm.query[0], probe.zero("mla.q_down", where=3).query[0])


@pytest.mark.parametrize("case", MLA_CASES)
@pytest.mark.parametrize("pair", [0, 1])
def test_rotary_dims_2p_and_2p_plus_1_are_turned_together(
    case: str, pair: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rotary the attention function gets first members, then second ones, whichever way they are stored."""
    probe = Probe(case, monkeypatch)
    role = "mla.q.rope" if probe.has("mla.q.rope") else "mla.q_up.rope"
    turned = [NOPE + pair, NOPE + pair + ROPE // 2]
    dims = slice(2 * pair, 2 * pair + 2)
    assert only(probe.zero(role, where=(1, dims)).query[0], probe.plain.query[0], (0, 1, ALL, turned))
    assert only(probe.zero("mla.kv_down.rope", where=dims).key[0], probe.plain.key[0], (0, ALL, ALL, turned))
    first = probe.zero(role, where=(1, 2 * pair)).query[0][:, :, 0]  # at position 0 nothing is turned yet
    assert only(first, probe.plain.query[0][:, :, 0], (0, 1, turned[0]))


@pytest.mark.parametrize("case", MLA_CASES)
def test_latent_keys_and_values(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(case, monkeypatch)
    plain = probe.plain
    seen = probe.zero("mla.kv_up.v", where=(2, 1))
    assert only(seen.value[0], plain.value[0], (0, 2, ALL, 1))
    assert same(seen.key[0], plain.key[0])
    seen = probe.zero("mla.kv_up.k", where=(2, 1))
    assert only(seen.key[0], plain.key[0], (0, 2, ALL, 1))
    assert same(seen.value[0], plain.value[0])
    seen = probe.zero("mla.kv_down.rope", where=ALL)
    assert only(seen.key[0], plain.key[0], (0, ALL, ALL, slice(NOPE, None)))
    assert same(seen.value[0], plain.value[0])
    for part in ("mla.kv_down.latent", "mla.kv_norm"):
        seen = probe.zero(part, where=ALL)
        assert not seen.value[0].any()
        assert only(seen.key[0], plain.key[0], (0, ALL, ALL, slice(0, NOPE)))
    one_rank = probe.zero("mla.kv_norm", where=6)
    assert same(one_rank.value[0], probe.zero("mla.kv_up.v", where=(ALL, ALL, 6)).value[0])
    assert same(one_rank.key[0], probe.zero("mla.kv_up.k", where=(ALL, ALL, 6)).key[0])


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3", "deepseek"])
def test_gate_goes_through_the_activation_and_up_does_not(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negating all of up negates the MLP's output; negating all of gate does not, since silu is not odd."""
    probe = Probe(case, monkeypatch)
    mlp, plain = "model.layers.0.mlp", probe.plain.outputs["model.layers.0.mlp"]
    assert same(probe.after(("trunk.0", "mlp.up", ALL, negated)).outputs[mlp], -plain)
    gate = probe.after(("trunk.0", "mlp.gate", ALL, negated)).outputs[mlp]
    assert not same(gate.abs(), plain.abs())
    one = probe.zero("mlp.gate", where=4).outputs[mlp]
    assert same(one, probe.zero("mlp.up", where=4).outputs[mlp])
    assert same(one, probe.zero("mlp.down", where=(ALL, 4)).outputs[mlp])
    assert only(probe.zero("mlp.down", where=6).outputs[mlp], plain, (0, ALL, 6))


def test_biases_of_the_gated_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe("llama, head_dim and every bias", monkeypatch)
    mlp = "model.layers.0.mlp"
    both = probe.after(("trunk.0", "mlp.up", ALL, negated), ("trunk.0", "mlp.up.bias", ALL, negated))
    without = probe.zero("mlp.down", where=ALL).outputs[mlp]  # only the bias of down is left
    assert same(both.outputs[mlp] - without, without - probe.plain.outputs[mlp])
    assert only(probe.zero("mlp.down", "mlp.down.bias", where=2).outputs[mlp], probe.plain.outputs[mlp], (0, ALL, 2))
    one = probe.zero("mlp.gate", "mlp.gate.bias", where=4).outputs[mlp]
    assert same(one, probe.zero("mlp.down", where=(ALL, 4)).outputs[mlp])


@pytest.mark.parametrize("case", ["llama", "qwen3, tied, biased", "deepseek"])
def test_embedding_head_and_norms(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(case, monkeypatch)
    plain, final = probe.plain, "model.norm"
    assert only(
        probe.after(("", "embedding", (15, 2))).outputs["model.embed_tokens"],
        plain.outputs["model.embed_tokens"],
        (0, 3, 2),  # IDS[0, 3] is 15
    )
    head = "embedding" if "tied" in case else "head"
    assert only(probe.after(("", head, 20)).logits, plain.logits, (0, ALL, 20))  # token 20 is not in IDS
    assert only(probe.after(("", "final_norm", 5)).outputs[final], plain.outputs[final], (0, ALL, 5))
    for role, reader in (("attn.input_norm", "self_attn"), ("mlp.norm", "mlp")):
        name = f"model.layers.1.{reader}"
        assert only(probe.after(("trunk.1", role, 5)).inputs[name], plain.inputs[name], (0, ALL, 5))


@pytest.mark.parametrize(
    ("case", "depth"), [("deepseek", 0), ("deepseek", 1), ("deepseek, hidden state first", 0), ("mellum", 0)]
)
def test_mtp_layer_knows_the_embedding_from_the_hidden_state(case: str, depth: int) -> None:
    probe = MtpProbe(depth, case)
    plain, joined = probe.out(None, 0, 0)
    assert not same(plain, probe.out(None, 1, 0)[0])
    assert not same(plain, probe.out(None, 0, 1)[0])
    for role in ("mtp.proj.embedding", "mtp.embedding_norm"):
        assert same(probe.out(role, 0, 0)[0], probe.out(role, 1, 0)[0])
        assert not same(probe.out(role, 0, 0)[0], probe.out(role, 0, 1)[0])
    for role in ("mtp.proj.hidden", "mtp.hidden_norm"):
        assert same(probe.out(role, 0, 0)[0], probe.out(role, 0, 1)[0])
        assert not same(probe.out(role, 0, 0)[0], probe.out(role, 1, 0)[0])
    for norm, half in (("mtp.embedding_norm", "mtp.proj.embedding"), ("mtp.hidden_norm", "mtp.proj.hidden")):
        assert same(probe.out(norm, 0, 0, 3)[1], probe.out(half, 0, 0, (ALL, 3))[1])
        assert not same(probe.out(norm, 0, 0, 3)[1], joined)
    assert only(probe.out("mtp.final_norm", 0, 0, 5)[0], plain, (0, ALL, 5))
    if case == "deepseek":  # it has two depths: the other one's norm has no effect on this one
        assert same(probe.out("mtp.final_norm", 0, 0, ALL, 1 - depth)[0], plain)


@pytest.mark.parametrize("case", ["qwen3 next", "qwen3.5"])
def test_the_first_half_of_qwens_projection_reads_the_embedding(case: str) -> None:
    """Converters disagree whether the halves of ``mtp.fc`` change places on the way to Megatron, which joins
    [embedding ; hidden]. transformers' MtpModel, which renames ``mtp.fc`` to ``eh_proj``, decides: they do not."""
    probe = MtpProbe(0, case)
    plain, _ = probe.out(None, 0, 0)
    assert not same(plain, probe.out(None, 1, 0)[0])
    assert not same(plain, probe.out(None, 0, 1)[0])
    for role, kept, changed in (("mtp.proj.embedding", (0, 1), (1, 0)), ("mtp.proj.hidden", (1, 0), (0, 1))):
        without = probe.out(role, 0, 0)[0]
        assert same(without, probe.out(role, *changed)[0])
        assert not same(without, probe.out(role, *kept)[0])
    (first,) = [p for p in probe.placed if p.role.name == "mtp.proj.embedding"]
    hidden = first.block.shape[0]
    assert (first.block.tensor, first.block.shape) == ("mtp.fc.weight", (hidden, 2 * hidden))
    assert first.block.box == ((0, hidden), (0, hidden))  # of [hidden, 2 hidden]


def test_decoder_layer_inside_an_mtp_layer() -> None:
    """Its parts are the trunk's: each zeroed changes the layer's output, and the joined input to it never."""
    probe = MtpProbe(1)
    plain, joined = probe.out(None, 0, 0)
    roles = {p.role.name for p in probe.placed if p.role.place == "mtp.1"}
    trunk = {p.role.name for p in probe.placed if p.role.place == "trunk.1"}
    assert trunk <= roles
    for role in ("attn.input_norm", "mla.kv_up.v", "attn.out", "mlp.norm", "expert.up", "shared.down"):
        changed, still = probe.out(role, 0, 0)
        assert not same(changed, plain), role
        assert same(still, joined)


@pytest.mark.parametrize("case", ["olmo 2", "minimax"])
def test_norms_over_all_heads_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(case, monkeypatch)
    for role, trace in (("attn.q_norm.joint", "query"), ("attn.k_norm.joint", "key")):
        seen = probe.zero(role, where=(2, 1))
        assert only(getattr(seen, trace)[0][:, :, 0], getattr(probe.plain, trace)[0][:, :, 0], (0, 2, 1))
    halved = probe.after(("trunk.0", "attn.q", 1, lambda x: x / 2))
    assert not same(halved.query[0][:, 0], probe.plain.query[0][:, 0])  # head 0 shares the norm


NORMS = {
    "gemma 2": ("post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm"),
    "gemma 3": ("post_attention_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm"),
    "glm 4": ("post_self_attn_layernorm", "post_mlp_layernorm", "post_attention_layernorm"),
    "olmo 2": ("post_attention_layernorm", "post_feedforward_layernorm", ""),
}


@pytest.mark.parametrize("case", NORMS)
def test_norms_of_outputs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that a role names norms what attention or the feed-forward part gave, or what the latter reads."""
    probe = Probe(case, monkeypatch)
    after_attention, after_mlp, before_mlp = NORMS[case]

    def erased(role: str) -> tuple[str, Seen]:
        if probe.has(f"{role}.minus_one"):
            return f"{role}.minus_one", probe.after(("trunk.1", f"{role}.minus_one", 5, lambda x: x * 0 - 1))
        return role, probe.after(("trunk.1", role, 5))

    layer, plain = "model.layers.1.", probe.plain
    for role, norm, source in (
        ("attn.output_norm", after_attention, plain.outputs[f"{layer}self_attn"][0]),
        ("mlp.output_norm", after_mlp, plain.outputs[f"{layer}mlp"]),
    ):
        name, seen = erased(role)
        assert only(seen.outputs[layer + norm], plain.outputs[layer + norm], (0, ALL, 5))
        assert same(plain.inputs[layer + norm], source)
        assert name.endswith(".minus_one") == ("gemma" in case)
    if before_mlp:
        assert only(erased("mlp.norm")[1].inputs[f"{layer}mlp"], plain.inputs[f"{layer}mlp"], (0, ALL, 5))
