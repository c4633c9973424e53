# SPDX-License-Identifier: MIT OR Unlicense
"""Attention over a sequence that several ranks share, in three ways: ring, llama3 and Ulysses.

Ring: keys and values go round; each hop's partial output is merged by its log-sum-exp. In the backward pass k, v go
round again, with dk and dv, which arrive home after as many hops as there are ranks. llama3: all keys and values are
gathered, dk and dv reduce-scattered. Ulysses: tokens are exchanged for heads, attention sees whole rows, and heads go
back for tokens. Shares may differ in length. Mistakes are planted in forward and backward passes alike.
"""
from dataclasses import dataclass
from functools import reduce

import torch

MINUS_INFINITY = float("-inf")


@dataclass
class Tokens:
    """Whose queries, or whose keys: places in the row, documents, and rows on the rank that has them."""
    places: torch.Tensor
    documents: torch.Tensor
    rows: torch.Tensor

    def __len__(self):
        return len(self.places)


class Setting:
    """All that one call of the attention knows beside q, k and v."""

    def __init__(self, c, share, ranks, tape=None):
        self.c, self.ranks, self.tape = c, ranks, tape
        self.mistake, self.variant = c.mistake, c.variant
        self.shares = [self._tokens(share, places) for places in share.all_places]
        self.own = self.shares[ranks.member]
        self.whole = self._tokens(share, torch.cat(share.all_places))
        self.kv_of_head = [h % c.kv_heads if self.mistake == "kv_heads_in_turn" else h // (c.heads // c.kv_heads)
                           for h in range(c.heads)]
        self.scale = c.softmax_scale or c.head_dim ** -0.5
        if self.mistake == "scale_missing":
            self.scale = c.head_dim ** -0.5
        self.window = 0 if self.mistake == "window_missing" else c.window
        self.softcap = 0 if self.mistake == "softcap_missing" else c.softcap

    @staticmethod
    def _tokens(share, places):
        return Tokens(places, share.row.document_of(places), torch.arange(len(places)))

    def seen(self, queries, keys):
        """A matrix: may this query see that key?"""
        distance = queries.places[:, None] - keys.places
        rows = queries.rows[:, None] - keys.rows
        ahead = rows if self.mistake == "causal_by_local_row" else distance
        seen = torch.ones_like(distance, dtype=torch.bool) if self.mistake == "looks_ahead" else ahead >= 0
        if self.mistake != "documents_ignored":
            seen &= queries.documents[:, None] == keys.documents
        if self.window:
            seen &= (rows if self.mistake == "window_by_local_row" else distance) < self.window
        return seen

    def plan(self, backward=False):
        """Hops of a ring that compute something."""
        if self.mistake == "hop_lost" and not (backward and self.variant == "forward"):
            return range(self.ranks.sp - 1)
        return range(self.ranks.sp)


# ---- one block: some queries and some keys, on this rank ----

def _scores(s, q, k, seen):
    scores = torch.einsum("qhd,khd->hqk", q, k) * s.scale
    slope = torch.ones_like(scores)
    if s.softcap:
        bounded = torch.tanh(scores / s.softcap)
        scores, slope = s.softcap * bounded, 1 - bounded ** 2
    return scores.masked_fill(~seen, MINUS_INFINITY), slope


def _exp(x, lse):
    """exp(x - lse); 0 where a query sees nothing, whose lse is -infinity."""
    return torch.exp(x - torch.where(torch.isinf(lse), torch.zeros_like(lse), lse))


def block(s, q, k, v, seen, kv_of_head):
    """Output (queries, heads, d) and log-sum-exp (queries, heads) of these queries over these keys alone."""
    scores, _ = _scores(s, q, k[:, kv_of_head], seen)
    lse = torch.logsumexp(scores, -1)
    weights = _exp(scores, lse[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v[:, kv_of_head]), lse.T


def block_backward(s, q, k, v, seen, kv_of_head, dout, lse, delta):
    """What these keys add to dq, and these queries to dk and dv. lse and delta are those over all keys."""
    scores, slope = _scores(s, q, k[:, kv_of_head], seen)
    weights = _exp(scores, lse.T[..., None])
    dweights = torch.einsum("qhd,khd->hqk", dout, v[:, kv_of_head])
    if s.mistake == "delta_missing":
        delta = torch.zeros_like(delta)
    dscores = weights * (dweights - delta.T[..., None]) * slope * s.scale
    dq = torch.einsum("hqk,khd->qhd", dscores, k[:, kv_of_head])
    dk = torch.zeros_like(k).index_add_(1, kv_of_head, torch.einsum("hqk,qhd->khd", dscores, q))
    dv = torch.zeros_like(v).index_add_(1, kv_of_head, torch.einsum("hqk,qhd->khd", weights, dout))
    return dq, dk, dv


def merge(one, other):
    """Two partial outputs over different keys, by their log-sum-exp."""
    lse = torch.logaddexp(one[1], other[1])
    return sum(_exp(part_lse, lse)[..., None] * out for out, part_lse in (one, other)), lse


def merge_swapped(one, other):
    """Each with the weight of the other, where both saw a key."""
    lse = torch.logaddexp(one[1], other[1])
    both = torch.isfinite(one[1]) & torch.isfinite(other[1])
    mine, theirs = (_exp(part[1], lse) for part in (one, other))
    mine, theirs = torch.where(both, theirs, mine), torch.where(both, mine, theirs)
    return mine[..., None] * one[0] + theirs[..., None] * other[0], lse


# ---- ring ----

def _circulate(s, hops, k, v):
    """Keys and values of each hop, and whose tokens they are said to be."""
    own = (k, v)
    for hop in hops:
        source = (s.ranks.member - hop) % s.ranks.sp
        yield source, *(own if s.mistake == "stale_kv" else (k, v))
        if hop != hops[-1]:
            before = s.shares[source - 1]
            k, v = s.ranks.pass_on([k, v], [x.new_empty(len(before), *x.shape[1:]) for x in (k, v)])


def ring_forward(s, q, k, v):
    heads = torch.tensor(s.kv_of_head)
    parts = [block(s, q, key.to(q.dtype), value.to(q.dtype), s.seen(s.own, s.shares[source]), heads)
             for source, key, value in _circulate(s, s.plan(), k, v)]
    out, lse = reduce(merge, parts)
    if s.mistake == "outputs_averaged":
        seen = sum(torch.isfinite(part[1]).to(q.dtype) for part in parts)
        number = seen.clamp(min=1) if s.variant == "where_seen" else torch.full_like(seen, len(parts))
        out = sum(part[0] for part in parts) / number[..., None]
    if s.mistake == "merge_weights_swapped":
        out, lse = reduce(merge_swapped, parts)
    shown = lse
    if s.mistake == "lse_of_last_hop":
        for _, part_lse in parts:
            shown = torch.where(torch.isfinite(part_lse), part_lse, shown)
        lse = shown if s.variant == "saved" else lse
    return out, shown, (k, v, lse, parts)


def ring_backward(s, q, dout, out, saved):
    k, v, lse, parts = saved
    heads = torch.tensor(s.kv_of_head)
    dq, kv = torch.zeros_like(q), [k, v, torch.zeros_like(k, dtype=q.dtype), torch.zeros_like(v, dtype=q.dtype)]
    for hop in range(s.ranks.sp):
        source = (s.ranks.member - hop) % s.ranks.sp
        if hop in s.plan(backward=True):
            key, value = (k, v) if s.mistake == "stale_kv" and s.variant == "both" else kv[:2]
            hop_lse, delta = _statistics(s, dout, out, lse, parts, hop)
            grads = block_backward(s, q, key.to(q.dtype), value.to(q.dtype), s.seen(s.own, s.shares[source]), heads,
                                   dout, hop_lse, delta)
            if hop == 0 or s.mistake != "dq_of_one_hop":
                dq += grads[0]
            if hop == 0 or s.mistake != "dkv_not_returned":
                kv[2] += grads[1]
                kv[3] += grads[2]
        before = s.shares[source - 1]
        kv = s.ranks.pass_on(kv, [x.new_empty(len(before), *x.shape[1:]) for x in kv])
    return dq, kv[2], kv[3]


def _statistics(s, dout, out, lse, parts, hop):
    """Log-sum-exp and delta = sum of dout * out, over all keys: a hop's own are those of another softmax."""
    if s.mistake != "delta_of_hop":
        return lse, (dout * out).sum(-1)
    hop_out, hop_lse = parts[hop]
    return hop_lse if s.variant == "lse_too" else lse, (dout * hop_out).sum(-1)


# ---- llama3 ----

def _gather(s, x):
    like = [x.new_empty(len(tokens), *x.shape[1:]) for tokens in s.shares]
    return torch.cat(s.ranks.exchange([x] * s.ranks.sp, like))


def llama3_forward(s, q, k, v):
    k, v = _gather(s, k).to(q.dtype), _gather(s, v).to(q.dtype)
    out, lse = block(s, q, k, v, s.seen(s.own, s.whole), torch.tensor(s.kv_of_head))
    return out, lse, (k, v, lse)


def llama3_backward(s, q, dout, out, saved):
    k, v, lse = saved
    dq, dk, dv = block_backward(s, q, k, v, s.seen(s.own, s.whole), torch.tensor(s.kv_of_head), dout, lse,
                                (dout * out).sum(-1))
    return dq, _scatter(s, dk), _scatter(s, dv)


def _scatter(s, x):
    """Each rank gets what all of them have for its keys."""
    to = list(x.split([len(tokens) for tokens in s.shares]))
    if s.mistake == "dkv_not_returned":
        return to[s.ranks.member]
    return sum(s.ranks.exchange(to, [to[s.ranks.member]] * s.ranks.sp))


# ---- Ulysses ----

def _heads_of(s):
    """Query heads of each rank, and the key-value heads that these need: ranks may share one."""
    cuts = [r * s.c.heads // s.ranks.sp for r in range(s.ranks.sp + 1)]
    query = [list(range(*cut)) for cut in zip(cuts, cuts[1:])]
    return query, [sorted({s.kv_of_head[h] for h in heads}) for heads in query]


def _to_heads(s, x, heads):
    """(own tokens, all heads) to (all tokens, own heads)."""
    own = len(heads[s.ranks.member])
    like = [x.new_empty(len(tokens), own, *x.shape[2:]) for tokens in s.shares]
    return torch.cat(s.ranks.exchange([x[:, h] for h in heads], like))


def _to_tokens(s, x, heads, number):
    """And back. What several ranks have of one head is added up."""
    like = [x.new_empty(len(s.own), len(h), *x.shape[2:]) for h in heads]
    whole = x.new_zeros(len(s.own), number, *x.shape[2:])
    for part, h in zip(s.ranks.exchange(list(x.split([len(t) for t in s.shares])), like), heads):
        whole[:, h] += part
    return whole


def ulysses_forward(s, q, k, v):
    query, kv = _heads_of(s)
    own = kv[s.ranks.member]
    local = torch.tensor([own.index(s.kv_of_head[h]) for h in query[s.ranks.member]])
    q, k, v = _to_heads(s, q, query), _to_heads(s, k, kv).to(q.dtype), _to_heads(s, v, kv).to(q.dtype)
    out, lse = block(s, q, k, v, s.seen(s.whole, s.whole), local)
    return _to_tokens(s, out, query, s.c.heads), _to_tokens(s, lse, query, s.c.heads), (q, k, v, lse, local)


def ulysses_backward(s, _, dout, out, saved):
    q, k, v, lse, local = saved
    query, kv = _heads_of(s)
    delta = _to_heads(s, (dout * out).sum(-1), query)
    dq, dk, dv = block_backward(s, q, k, v, s.seen(s.whole, s.whole), local, _to_heads(s, dout, query), lse, delta)
    return _to_tokens(s, dq, query, s.c.heads), *(_to_tokens(s, x, kv, s.c.kv_heads) for x in (dk, dv))


# ---- all of them ----

def own_forward(s, q, k, v):
    """As if the rank's share were the whole row."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    out, lse = block(s, q, k, v, s.seen(s.own, s.own), torch.tensor(s.kv_of_head))
    return out, lse, (k, v, lse)


def own_backward(s, q, dout, out, saved):
    k, v, lse = saved
    delta = (dout * out).sum(-1)
    return block_backward(s, q, k, v, s.seen(s.own, s.own), torch.tensor(s.kv_of_head), dout, lse, delta)


WAYS = {"ring": (ring_forward, ring_backward), "llama3": (llama3_forward, llama3_backward),
        "ulysses": (ulysses_forward, ulysses_backward), "own": (own_forward, own_backward)}


class Attention(torch.autograd.Function):
    """q (n, heads, d), k and v (n, kv_heads, d) of this rank's tokens. In fp32 at least, as in flash attention."""

    @staticmethod
    def forward(ctx, q, k, v, s):
        way = "own" if s.mistake == "own_tokens_only" else s.c.attention
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        out, lse, ctx.rest = WAYS[way][0](s, wide, k, v)
        out = out.to(q.dtype)
        ctx.s, ctx.backward_of_way, ctx.q = s, WAYS[way][1], wide
        ctx.save_for_backward(out)
        if s.tape is not None:
            s.tape.update(q=q.detach(), k=k.detach(), v=v.detach(), out=out.clone(), lse=lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        wide = ctx.q.dtype
        dq, dk, dv = ctx.backward_of_way(ctx.s, ctx.q, dout.to(wide), ctx.saved_tensors[0].to(wide), ctx.rest)
        if ctx.s.mistake == "dk_dv_swapped":
            dk, dv = dv, dk
        dq, dk, dv = (x.to(dout.dtype) for x in (dq, dk, dv))
        if ctx.s.tape is not None:
            ctx.s.tape.update(dout=dout, dq=dq, dk=dk, dv=dv)
        return dq, dk, dv, None


def rotary(x, positions, base):
    """Turns pairs of coordinates by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = positions[:, None].to(torch.float64) * base ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = (f(angles)[:, None].to(torch.promote_types(x.dtype, torch.float32)) for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


