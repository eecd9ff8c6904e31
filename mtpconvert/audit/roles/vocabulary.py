"""The names of meanings, with the axes of each: the one thing that both halves share.

Every definition is in terms of the mathematics, never of a framework's storage. ``y = W x`` throughout: a weight's
"row" produces an output element, a "column" reads an input element of the hidden state.

A norm's role holds its scale: ``scale * x / rms(x)``. Where a framework keeps ``scale - 1`` instead ("1 + w",
zero-centred), the role is ``minus_one(name)``: another meaning, so that bytes of the two conventions never pass for
equal. Which of the two holds is for each half to say, tensor by tensor; where sides differ in it, ``audit/less_one``
compares them.
"""

_ROLES: dict[str, tuple[tuple[str, ...], str]] = {
    # the model
    "embedding": (("token", "column"), "vector that enters the first layer for a token"),
    "head": (("token", "column"), "row that gives a token's logit"),
    "final_norm": (("column",), "scale of the norm after the last trunk layer"),
    # rows that no token has; the place is "embedding" or "head". Only Megatron holds any; worth a word if non-zero
    "padding": (("token", "column"), "rows after the last token of the vocabulary"),
    # grouped-query attention; query head h reads key/value head h // (heads / kv_heads)
    "attn.input_norm": (("column",), "scale of the norm before attention"),
    "attn.q": (("head", "dim", "column"), "query projection"),
    "attn.k": (("kv_head", "dim", "column"), "key projection"),
    "attn.v": (("kv_head", "dim", "column"), "value projection"),
    "attn.q.bias": (("head", "dim"), "bias of the query projection"),
    "attn.k.bias": (("kv_head", "dim"), "bias of the key projection"),
    "attn.v.bias": (("kv_head", "dim"), "bias of the value projection"),
    "attn.q_norm": (("dim",), "scale of the per-head norm of queries"),
    "attn.k_norm": (("dim",), "scale of the per-head norm of keys"),
    "attn.out": (("row", "head", "dim"), "output projection, its input split by query head"),
    "attn.out.bias": (("row",), "bias of the output projection"),
    "attn.gate": (("head", "dim", "column"), "gate: what a head attended is multiplied by sigmoid(gate x) before out"),
    "attn.gate.bias": (("head", "dim"), "bias of that gate"),
    "attn.sink": (("head",), "logit that takes part in a query head's softmax and has no value"),
    "attn.q_norm.joint": (("head", "dim"), "scale of the norm taken over all query heads together"),
    "attn.k_norm.joint": (("kv_head", "dim"), "scale of the norm taken over all key heads together"),
    "attn.output_norm": (("column",), "scale of the norm of attention's output, before it joins the residual"),
    # multi-head latent attention; "nope" dims carry no rotary embedding, "rope" dims do
    "mla.q_down": (("rank", "column"), "query down projection"),
    "mla.q_down_norm": (("rank",), "scale of the norm of the query latent"),
    "mla.q_up.nope": (("head", "dim", "rank"), "query up projection, dims without rotary"),
    "mla.q_up.rope": (("head", "dim", "rank"), "query up projection, rotary dims"),
    "mla.q.nope": (("head", "dim", "column"), "query projection without a latent, dims without rotary"),
    "mla.q.rope": (("head", "dim", "column"), "query projection without a latent, rotary dims"),
    "mla.kv_down.latent": (("rank", "column"), "key/value down projection to the latent"),
    "mla.kv_down.rope": (("dim", "column"), "the shared rotary key"),
    "mla.kv_norm": (("rank",), "scale of the norm of the key/value latent"),
    "mla.kv_up.k": (("head", "dim", "rank"), "key up projection, dims without rotary"),
    "mla.kv_up.v": (("head", "dim", "rank"), "value up projection"),
    # sparse attention's indexer (DSA): score = sum over heads of weights x * relu(q . k); q reads the query latent, k
    # is one per token, normed (with mean and bias) over nope and rope dims together; of rope dims 2p and 2p + 1 are
    # turned together by frequency p, and the same holds for every "rope" role of latent attention
    "dsa.q.nope": (("head", "dim", "rank"), "index queries, dims without rotary"),
    "dsa.q.rope": (("head", "dim", "rank"), "index queries, rotary dims"),
    "dsa.k.nope": (("dim", "column"), "index key, dims without rotary"),
    "dsa.k.rope": (("dim", "column"), "index key, rotary dims"),
    "dsa.k_norm.nope": (("dim",), "scale of the norm of the index key, dims without rotary"),
    "dsa.k_norm.rope": (("dim",), "scale of the norm of the index key, rotary dims"),
    "dsa.k_norm.bias.nope": (("dim",), "bias of that norm, dims without rotary"),
    "dsa.k_norm.bias.rope": (("dim",), "bias of that norm, rotary dims"),
    "dsa.weights": (("head", "column"), "weight of each index head's score"),
    # gated delta net (linear attention), in the place of attention after attn.input_norm; value head h reads key head
    # h // (value_heads / key_heads). q, k, v each go through a causal convolution per channel (the last tap reads the
    # token itself) and silu; decay = exp(-exp(a_log) * softplus(a x + dt_bias)), beta = sigmoid(b x)
    "gdn.q": (("key_head", "dim", "column"), "query projection"),
    "gdn.k": (("key_head", "dim", "column"), "key projection"),
    "gdn.v": (("value_head", "dim", "column"), "value projection"),
    "gdn.z": (("value_head", "dim", "column"), "output gate: the normed output is multiplied by silu(z x)"),
    "gdn.b": (("value_head", "column"), "projection to beta, the strength of writing"),
    "gdn.a": (("value_head", "column"), "projection to the step of the decay"),
    "gdn.conv.q": (("key_head", "dim", "tap"), "convolution of queries"),
    "gdn.conv.k": (("key_head", "dim", "tap"), "convolution of keys"),
    "gdn.conv.v": (("value_head", "dim", "tap"), "convolution of values"),
    "gdn.a_log": (("value_head",), "logarithm of the rate of decay"),
    "gdn.dt_bias": (("value_head",), "bias of the step"),
    "gdn.norm": (("dim",), "scale of the norm of each value head's output, shared by the heads"),
    "gdn.out": (("row", "value_head", "dim"), "output projection, its input split by value head"),
    # gated feed-forward: down(act(gate x) * up x)
    "mlp.norm": (("column",), "scale of the norm before the feed-forward part, dense or MoE"),
    "mlp.gate": (("unit", "column"), "projection that goes through the activation"),
    "mlp.up": (("unit", "column"), "projection that is multiplied in"),
    "mlp.down": (("row", "unit"), "down projection"),
    "mlp.gate.bias": (("unit",), "bias of gate"),
    "mlp.up.bias": (("unit",), "bias of up"),
    "mlp.down.bias": (("row",), "bias of down"),
    "mlp.output_norm": (("column",), "scale of the norm of the feed-forward output, before it joins the residual"),
    # mixture of experts
    "router": (("expert", "column"), "router weight"),
    "router.bias": (("expert",), "bias added to the router's logits, in choosing and in weighting alike"),
    "router.correction": (("expert",), "bias added to scores for choosing experts only (aux-loss-free balancing)"),
    "expert.gate": (("expert", "unit", "column"), "gate of each routed expert"),
    "expert.up": (("expert", "unit", "column"), "up of each routed expert"),
    "expert.down": (("expert", "row", "unit"), "down of each routed expert"),
    "expert.gate.bias": (("expert", "unit"), "bias of gate of each routed expert"),
    "expert.up.bias": (("expert", "unit"), "bias of up of each routed expert"),
    "expert.down.bias": (("expert", "row"), "bias of down of each routed expert"),
    "shared.gate": (("unit", "column"), "gate of the shared expert(s)"),
    "shared.up": (("unit", "column"), "up of the shared expert(s)"),
    "shared.down": (("row", "unit"), "down of the shared expert(s)"),
    "shared.mix": (("column",), "the shared expert's output is multiplied by the number sigmoid(mix x)"),
    # the multi-token-prediction block: layer k reads the hidden state of depth k-1 and the next token's embedding
    "mtp.embedding_norm": (("column",), "scale of the norm of the next token's embedding"),
    "mtp.hidden_norm": (("column",), "scale of the norm of the incoming hidden state"),
    "mtp.proj.embedding": (("row", "column"), "columns of the joining projection that read the embedding"),
    "mtp.proj.hidden": (("row", "column"), "columns of the joining projection that read the hidden state"),
    "mtp.final_norm": (("column",), "scale of the norm after the MTP layer, before the head"),
}

_MINUS_ONE = ".minus_one"
_SCALES = tuple(name for name in _ROLES if name.endswith(("norm", "norm.joint", "norm.nope", "norm.rope")))

ROLES: dict[str, tuple[tuple[str, ...], str]] = {
    **_ROLES,
    **{name + _MINUS_ONE: (_ROLES[name][0], f"{_ROLES[name][1]}, less one") for name in _SCALES},
}


def minus_one(norm: str) -> str:
    """The role of the norm ``norm`` where ``scale - 1`` is kept; raises KeyError for a role that is no norm's scale."""
    if norm not in _SCALES:
        raise KeyError(f"{norm} is not the scale of a norm")
    return norm + _MINUS_ONE


def is_norm(role: str) -> bool:
    """Whether the role is the scale of a norm, kept either way."""
    return scale_of(role) in _SCALES


def is_minus_one(role: str) -> bool:
    """Whether ``scale - 1`` is kept under this role."""
    return role.endswith(_MINUS_ONE)


def scale_of(role: str) -> str:
    """The norm that ``minus_one`` made the role of; any other role as it is."""
    return role.removesuffix(_MINUS_ONE)
