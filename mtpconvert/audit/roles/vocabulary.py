"""The names of meanings, with the axes of each: the one thing that both halves share.

Every definition is in terms of the mathematics, never of a framework's storage. ``y = W x`` throughout: a weight's
"row" produces an output element, a "column" reads an input element of the hidden state.
"""

ROLES: dict[str, tuple[tuple[str, ...], str]] = {
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
    # gated feed-forward: down(act(gate x) * up x)
    "mlp.norm": (("column",), "scale of the norm before the feed-forward part, dense or MoE"),
    "mlp.gate": (("unit", "column"), "projection that goes through the activation"),
    "mlp.up": (("unit", "column"), "projection that is multiplied in"),
    "mlp.down": (("row", "unit"), "down projection"),
    "mlp.gate.bias": (("unit",), "bias of gate"),
    "mlp.up.bias": (("unit",), "bias of up"),
    "mlp.down.bias": (("row",), "bias of down"),
    # mixture of experts
    "router": (("expert", "column"), "router weight"),
    "router.correction": (("expert",), "bias added to scores for choosing experts only (aux-loss-free balancing)"),
    "expert.gate": (("expert", "unit", "column"), "gate of each routed expert"),
    "expert.up": (("expert", "unit", "column"), "up of each routed expert"),
    "expert.down": (("expert", "row", "unit"), "down of each routed expert"),
    "shared.gate": (("unit", "column"), "gate of the shared expert(s)"),
    "shared.up": (("unit", "column"), "up of the shared expert(s)"),
    "shared.down": (("row", "unit"), "down of the shared expert(s)"),
    # the multi-token-prediction block: layer k reads the hidden state of depth k-1 and the next token's embedding
    "mtp.embedding_norm": (("column",), "scale of the norm of the next token's embedding"),
    "mtp.hidden_norm": (("column",), "scale of the norm of the incoming hidden state"),
    "mtp.proj.embedding": (("row", "column"), "columns of the joining projection that read the embedding"),
    "mtp.proj.hidden": (("row", "column"), "columns of the joining projection that read the hidden state"),
    "mtp.final_norm": (("column",), "scale of the norm after the MTP layer, before the head"),
}
