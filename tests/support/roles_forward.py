"""A forward pass written from the definitions in ``mtpconvert/audit/roles/vocabulary.py`` alone.

It knows no framework: it reads tensors by role, (place, name) -> tensor, and does what the vocabulary says each of
them means. Whoever gathers the roles of a checkpoint wrongly gets other numbers than the framework itself. fp32.
"""

from collections.abc import Mapping
from typing import Any

import torch

Roles = Mapping[tuple[str, str], torch.Tensor]


def gather(placements: Any, tensors: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
    """The role tensors, each element from the (last) holder that names it; NaN where nobody does."""
    roles: dict[tuple[str, str], torch.Tensor] = {}
    for p in placements:
        source = tensors[p.block.tensor].reshape(p.block.grid)[tuple(slice(*i) for i in p.block.box)].squeeze()
        if p.perm is not None:
            source = source.permute(p.perm)
        role = roles.setdefault((p.role.place, p.role.name), torch.full(p.role.shape, float("nan")))
        role[tuple(slice(*i) for i in p.part)] = source.reshape([stop - start for start, stop in p.part])
    return roles


class Forward:
    """``facts``: Megatron arguments, for the numbers that are no weights (epsilon, rotary base, top-k, scaling)."""

    def __init__(self, roles: Roles, facts: Mapping[str, Any]) -> None:
        self.roles, self.facts = roles, facts

    def get(self, place: str, name: str) -> torch.Tensor:
        return self.roles[place, name]

    def plus_bias(self, y: torch.Tensor, place: str, name: str) -> torch.Tensor:
        bias = self.roles.get((place, name))
        return y if bias is None else y + bias

    def norm(self, x: torch.Tensor, place: str, name: str) -> torch.Tensor:
        """RMS norm over as many last axes as the scale has; the identity where the role does not exist."""
        scale = self.roles.get((place, name))
        if scale is None:
            return x
        over = list(range(-scale.dim(), 0))
        return x * torch.rsqrt(x.pow(2).mean(over, keepdim=True) + self.facts["norm_epsilon"]) * scale

    def rotate(self, x: torch.Tensor, *, adjacent: bool) -> torch.Tensor:
        """x [s, heads, dim]: pairs (2i, 2i+1) if ``adjacent``, else (i, i + dim/2), turned by position * frequency."""
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[0])[:, None] / 10000 ** (torch.arange(half) / half)
        pairs = x.unflatten(-1, (half, 2)) if adjacent else x.unflatten(-1, (2, half)).transpose(-1, -2)
        real, imaginary = pairs.unbind(-1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), -1)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        hidden: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [s, heads, d], k and v [s, kv_heads, d]: query head h reads key/value head h // (heads / kv_heads).

        ``hidden`` [s, t]: what a position cannot see (None: what is later). ``sink`` [heads].
        """
        each = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        scores = torch.einsum("shd,thd->hst", q, k) / q.shape[-1] ** 0.5
        if hidden is None:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True) + (0 if sink is None else sink.exp()[:, None, None])
        return torch.einsum("hst,thd->shd", weights / total, v)

    def attention(self, x: torch.Tensor, at: str) -> torch.Tensor:
        x = self.norm(x, at, "attn.input_norm")
        if (at, "gdn.q") in self.roles:
            return self.delta_net(x, at)
        q, k, v = self.mla(x, at) if (at, "mla.kv_up.k") in self.roles else self.gqa(x, at)
        unseen = self.not_picked(x, at) if (at, "dsa.weights") in self.roles else None
        y = self.attend(q, k, v, unseen, self.roles.get((at, "attn.sink")))
        if (at, "attn.gate") in self.roles:
            y = y * self.heads(x, at, "attn.gate").sigmoid()
        y = torch.einsum("shd,rhd->sr", y, self.get(at, "attn.out"))
        return self.plus_bias(y, at, "attn.out.bias")

    def heads(self, x: torch.Tensor, at: str, name: str) -> torch.Tensor:
        """x [s, column] -> [s, head, dim]."""
        return self.plus_bias(torch.einsum("sc,hdc->shd", x, self.get(at, name)), at, f"{name}.bias")

    def gqa(self, x: torch.Tensor, at: str) -> list[torch.Tensor]:
        q, k, v = (self.heads(x, at, f"attn.{n}") for n in "qkv")
        q, k = (
            self.norm(self.norm(t, at, f"attn.{n}_norm"), at, f"attn.{n}_norm.joint") for t, n in ((q, "q"), (k, "k"))
        )
        return [self.rotate(q, adjacent=False), self.rotate(k, adjacent=False), v]

    def mla(self, x: torch.Tensor, at: str) -> list[torch.Tensor]:
        if (at, "mla.q_down") in self.roles:
            reads = self.norm(x @ self.get(at, "mla.q_down").T, at, "mla.q_down_norm")
            stem = "mla.q_up"
        else:
            reads, stem = x, "mla.q"
        q_nope, q_rope = (torch.einsum("sr,hdr->shd", reads, self.get(at, f"{stem}.{n}")) for n in ("nope", "rope"))
        latent = self.norm(x @ self.get(at, "mla.kv_down.latent").T, at, "mla.kv_norm")
        k_nope, v = (torch.einsum("sr,hdr->shd", latent, self.get(at, f"mla.kv_up.{n}")) for n in "kv")
        k_rope = self.rotate((x @ self.get(at, "mla.kv_down.rope").T)[:, None], adjacent=True)
        q = torch.cat((q_nope, self.rotate(q_rope, adjacent=True)), -1)
        return [q, torch.cat((k_nope, k_rope.expand(-1, q.shape[1], -1)), -1), v]

    def not_picked(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """[s, t]: what is later, or not among the positions of the highest index scores. x is normed."""
        scores = self.index_scores(x, at)
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        picked = scores.masked_fill(later, float("-inf")).topk(min(self.facts["dsa_indexer_topk"], len(x))).indices
        return later | torch.ones_like(later).scatter(1, picked, False)

    def index_scores(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """[s, t]: of position t for s. x is normed."""
        reads = self.norm(x @ self.get(at, "mla.q_down").T, at, "mla.q_down_norm")
        both = ("rope", "nope")
        q = torch.cat([torch.einsum("sr,hdr->shd", reads, self.get(at, f"dsa.q.{kind}")) for kind in both], -1)
        k = torch.cat([x @ self.get(at, f"dsa.k.{kind}").T for kind in both], -1)
        scale, bias = (torch.cat([self.get(at, f"dsa.k_norm{n}.{kind}") for kind in both]) for n in ("", ".bias"))
        k = torch.nn.functional.layer_norm(k, k.shape[-1:], scale, bias, self.facts["norm_epsilon"])
        turned = len(self.get(at, "dsa.k.rope"))
        q, k = (torch.cat((self.rotate(t[..., :turned], adjacent=True), t[..., turned:]), -1) for t in (q, k[:, None]))
        scores = torch.einsum("shd,td->sht", q, k[:, 0]).relu()
        return torch.einsum("sht,sh->st", scores, x @ self.get(at, "dsa.weights").T)

    def delta_net(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """The recurrence itself, token by token; the state [value head, key dim, value dim] starts at zero."""
        q, k, v = (self.convolved(torch.einsum("sc,hdc->shd", x, self.get(at, f"gdn.{n}")), at, n) for n in "qkv")
        q, k = (t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        each = v.shape[1] // k.shape[1]
        q, k = q.repeat_interleave(each, 1) / q.shape[-1] ** 0.5, k.repeat_interleave(each, 1)
        step = torch.nn.functional.softplus(x @ self.get(at, "gdn.a").T + self.get(at, "gdn.dt_bias"))
        decay = (-self.get(at, "gdn.a_log").exp() * step).exp()
        beta = (x @ self.get(at, "gdn.b").T).sigmoid()
        state = torch.zeros(v.shape[1], k.shape[2], v.shape[2])
        out = torch.empty_like(v)
        for t in range(len(x)):
            state = state * decay[t][:, None, None]
            missing = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * missing)
            out[t] = torch.einsum("hk,hkv->hv", q[t], state)
        z = torch.einsum("sc,hdc->shd", x, self.get(at, "gdn.z"))
        out = self.norm(out, at, "gdn.norm") * torch.nn.functional.silu(z)
        return torch.einsum("shd,rhd->sr", out, self.get(at, "gdn.out"))

    def convolved(self, x: torch.Tensor, at: str, name: str) -> torch.Tensor:
        """x [s, head, dim]: every channel by its own filter, then silu."""
        filters = self.get(at, f"gdn.conv.{name}")
        taps = filters.shape[-1]
        padded = torch.cat((x.new_zeros(taps - 1, *x.shape[1:]), x))
        y = torch.stack([(padded[t : t + taps].movedim(0, -1) * filters).sum(-1) for t in range(len(x))])
        return torch.nn.functional.silu(y)

    def feed_forward(self, x: torch.Tensor, at: str) -> torch.Tensor:
        x = self.norm(x, at, "mlp.norm")
        return self.moe(x, at) if (at, "router") in self.roles else self.gated(x, at, "mlp")

    def gated(self, x: torch.Tensor, at: str, stem: str, expert: int | None = None) -> torch.Tensor:
        """down(silu(gate x) * up x) of the roles under ``stem``; of one ``expert`` where each role holds many."""

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            weight, bias = self.get(at, f"{stem}.{name}"), self.roles.get((at, f"{stem}.{name}.bias"))
            if expert is not None:
                weight, bias = weight[expert], None if bias is None else bias[expert]
            return torch.nn.functional.linear(x, weight, bias)

        return linear(torch.nn.functional.silu(linear(x, "gate")) * linear(x, "up"), "down")

    def moe(self, x: torch.Tensor, at: str) -> torch.Tensor:
        logits, top = self.plus_bias(x @ self.get(at, "router").T, at, "router.bias"), self.facts["moe_router_topk"]
        if self.facts.get("moe_router_score_function") == "sigmoid":
            scores = logits.sigmoid()
            chosen = (scores + self.get(at, "router.correction")).topk(top).indices
            weights = scores.gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True) * self.facts["moe_router_topk_scaling_factor"]
        else:
            values, chosen = logits.topk(top)
            weights = values.softmax(-1)
        y = self.gated(x, at, "shared") if (at, "shared.gate") in self.roles else torch.zeros_like(x)
        if (at, "shared.mix") in self.roles:
            y = y * (x @ self.get(at, "shared.mix")).sigmoid()[:, None]
        for token in range(x.shape[0]):
            for weight, expert in zip(weights[token], chosen[token], strict=True):
                y[token] += weight * self.gated(x[token], at, "expert", int(expert))
        return y

    def layer(self, x: torch.Tensor, at: str) -> torch.Tensor:
        x = x + self.norm(self.attention(x, at), at, "attn.output_norm")
        return x + self.norm(self.feed_forward(x, at), at, "mlp.output_norm")

    def hidden_states(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """tokens [s] -> [s, column] each: the trunk's last normed hidden state, then every MTP layer's.

        The MTP layer k reads the embedding of the token k + 1 ahead; past the end that is token 0.
        """
        embedding = self.get("", "embedding")
        x = embedding[tokens]
        for i in range(self.facts["num_layers"]):
            x = self.layer(x, f"trunk.{i}")
        states = [self.norm(x, "", "final_norm")]
        for k in range(self.facts["mtp_num_layers"] or 0):
            at = "mtp.0" if self.facts.get("mtp_use_repeated_layer") else f"mtp.{k}"
            tokens = torch.cat((tokens[1:], tokens.new_zeros(1)))
            x = self.norm(embedding[tokens], at, "mtp.embedding_norm") @ self.get(at, "mtp.proj.embedding").T
            x = x + self.norm(states[-1], at, "mtp.hidden_norm") @ self.get(at, "mtp.proj.hidden").T
            states.append(self.norm(self.layer(x, at), at, "mtp.final_norm"))
        return states

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """[s, tokens]; a model without a head of its own reads the embedding."""
        return state @ self.roles.get(("", "head"), self.get("", "embedding")).T
