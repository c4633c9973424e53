# SPDX-License-Identifier: MIT OR Unlicense
"""seqpar_reference against the same numbers computed here, densely and in fp64: test_reference.py SEQPAR_VERIFY FOLDER.

Prints "ok ..", "FAIL .." and "skip ..", and exits with 1 if a test failed.
"""
import os
import sys

import numpy as np

os.environ["SEQPAR_VERIFY"], FOLDER = sys.argv[1:3]
import seqpar_dump  # noqa: E402
import seqpar_reference as reference  # noqa: E402

RANDOM = np.random.default_rng(3)
CUTS = [0, 5, 6, 16]  # documents of 5, 1 and 10 tokens
DOCUMENT = np.repeat([0, 1, 2], [5, 1, 10])
T = 16
failed = 0


def check(name, right, said=""):
    global failed
    failed += not right
    print(f"ok reference_{name}" if right else f"FAIL reference_{name}: {said}".replace("\n", " ")[:250])


def near(name, got, want, tolerance=1e-12):
    got, want = np.asarray(got, float), np.asarray(want, float)
    right = got.shape == want.shape and np.allclose(got, want, tolerance, tolerance)
    check(name, right, f"{got.ravel()[:4]} of {got.shape}, not {want.ravel()[:4]} of {want.shape}")


def refused(name, words, call):
    try:
        check(name, False, f"accepted: {call()}")
    except ValueError as e:
        check(name, words in str(e) and "/tmp" not in str(e) and "\n" not in str(e), e)


# ---- packed documents ----

def test_documents():
    ids = RANDOM.permutation(90)[:T]
    shifted = np.array([ids[t + 1] if t + 1 < T and DOCUMENT[t] == DOCUMENT[t + 1] else -100 for t in range(T)])
    near("positions", reference.positions(CUTS), [*range(5), 0, *range(10)])
    near("labels", reference.labels(ids, CUTS), shifted)
    near("labels_of_one_document", reference.labels(ids), [*ids[1:], -100])
    near("labels_batch", reference.labels(ids[None].astype("int32"), CUTS), shifted[None])
    prompt = np.where(np.arange(T) < 9, -100, 0)
    near("labels_masked", reference.labels(ids, CUTS, labels=prompt), np.where(prompt == -100, -100, shifted))
    rows = reference.pack(ids, CUTS, 12)
    found = sorted(list(row["ids"][a:b]) for row in rows for a, b in zip(row["cu_seqlens"], row["cu_seqlens"][1:]))
    check("pack_documents", found == sorted(list(ids[a:b]) for a, b in zip(CUTS, CUTS[1:])), found)
    check("pack_fits", len(rows) == 2 and all(len(row["ids"]) <= 12 for row in rows), rows)
    for i, row in enumerate(rows):
        cuts = row["cu_seqlens"]
        near(f"pack_positions_{i}", row["positions"], np.concatenate([np.arange(n) for n in np.diff(cuts)]))
        ends = np.isin(np.arange(len(row["ids"])) + 1, cuts)
        near(f"pack_labels_{i}", row["labels"], np.where(ends, -100, np.append(row["ids"][1:], 0)))
    masked = reference.pack(ids, CUTS, 12, labels=prompt)
    trained = dict(zip(ids, np.where(prompt == -100, -100, shifted)))
    near("pack_masked", np.concatenate([row["labels"] for row in masked]), [trained[i] for row in masked for i in row["ids"]])


def chunks(tokens, count):
    bounds = [i * tokens // count for i in range(count + 1)]
    return [list(range(a, b)) for a, b in zip(bounds, bounds[1:])]


def test_layouts():
    zigzag = chunks(T, 6)
    want = {"contiguous": chunks(T, 3), "stripe": [list(range(r, T, 3)) for r in range(3)],
            "zigzag": [zigzag[r] + zigzag[5 - r] for r in range(3)]}
    x = RANDOM.normal(size=(T, 2, 3, 2)).astype("float32")
    for layout, shares in want.items():
        got = reference.places(T, 3, layout)
        check(f"places_{layout}", [list(i) for i in got] == shares, got)
        split = reference.split(x, 3, layout)
        check(f"split_{layout}", all(np.array_equal(a, x[i]) and a.dtype == x.dtype for a, i in zip(split, shares)), split[0].shape)
        check(f"unsplit_{layout}", np.array_equal(reference.unsplit(split, layout=layout), x))
    got = reference.places(12, 2, "zigzag-doc", [0, 4, 12])
    check("places_zigzag-doc", [list(i) for i in got] == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]], got)
    check("unsplit_zigzag-doc", np.array_equal(reference.unsplit(reference.split(x[:12], 2, "zigzag-doc", [0, 4, 12]),
                                                                 layout="zigzag-doc", cu_seqlens=[0, 4, 12]), x[:12]))
    mixed = RANDOM.permutation(T)
    check("unsplit_index", np.array_equal(reference.unsplit([x[mixed[:7]], x[mixed[7:]]], [mixed[:7], mixed[7:]]), x))
    few, pieces = np.arange(10) % 3 == 0, chunks(10, 16)
    shares = reference.split(few, 8)  # two ranks have no token
    check("split_empty", [list(s) for s in shares] == [list(few[pieces[r] + pieces[15 - r]]) for r in range(8)], shares)
    check("unsplit_empty", np.array_equal(reference.unsplit(shares), few))


# ---- attention ----

def dense(q, k, v, sees, scale, softcap=0.0):
    """out, lse and the gradient by out of one head, from scores of all pairs."""
    raw = q @ k.T * scale
    capped = softcap * np.tanh(raw / softcap) if softcap else raw
    scores = np.where(sees, capped, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - np.where(np.isfinite(lse), lse, 0)[:, None])

    def gradient(dout):
        dp = dout @ v.T
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * (1 - (capped / softcap) ** 2 if softcap else 1) * scale
        return ds @ k, ds.T @ q, p.T @ dout
    return p @ v, lse, gradient


def test_attention():
    q, dout = RANDOM.normal(size=(T, 4, 8)), RANDOM.normal(size=(T, 4, 6))
    k, v = RANDOM.normal(size=(T, 2, 8)), RANDOM.normal(size=(T, 2, 6))
    behind = np.arange(T)[:, None] - np.arange(T)[None]
    causal = (behind >= 0) & (DOCUMENT[:, None] == DOCUMENT[None])
    ways = {"": ({}, causal, 8 ** -0.5, 0), "_window": ({"window": 3}, causal & (behind < 3), 8 ** -0.5, 0),
            "_scale": ({"softmax_scale": 0.2}, causal, 0.2, 0), "_softcap": ({"softcap": 1.5}, causal, 8 ** -0.5, 1.5)}
    for name, (options, sees, scale, softcap) in ways.items():
        heads = [dense(q[:, h], k[:, h // 2], v[:, h // 2], sees, scale, softcap) for h in range(4)]
        out, lse = reference.attention(q, k, v, CUTS, lse=True, **options)
        near(f"attention{name}", out, np.stack([h[0] for h in heads], 1))
        near(f"attention{name}_lse", lse, np.stack([h[1] for h in heads], 1))
        want = [h[2](dout[:, i]) for i, h in enumerate(heads)]
        dq, dk, dv = reference.attention_gradient(q, k, v, dout, CUTS, **options)
        near(f"attention{name}_dq", dq, np.stack([w[0] for w in want], 1))
        near(f"attention{name}_dk", dk, np.stack([want[0][1] + want[1][1], want[2][1] + want[3][1]], 1))
        near(f"attention{name}_dv", dv, np.stack([want[0][2] + want[1][2], want[2][2] + want[3][2]], 1))
    whole = [dense(q[:, h], k[:, h // 2], v[:, h // 2], behind >= 0, 8 ** -0.5) for h in range(4)]
    near("attention_of_one_document", reference.attention(q[None], k[None], v[None]), np.stack([h[0] for h in whole], 1)[None])
    parts = [[dense(q[:, h], k[at, h // 2], v[at, h // 2], (behind >= 0)[:, at], 8 ** -0.5) for h in range(4)]
             for at in (slice(0, 7), slice(7, T))]
    out, lse = reference.merge(np.stack([np.stack([h[0] for h in part], 1) for part in parts]),
                               np.stack([np.stack([h[1] for h in part], 1) for part in parts]))
    near("merge", out, np.stack([h[0] for h in whole], 1))
    near("merge_lse", lse, np.stack([h[1] for h in whole], 1))


# ---- losses ----

LABELS = np.where(np.isin(np.arange(T), [0, 4, 5, 7, 15]), -100, 1)
TRAINED = LABELS != -100
PAIRS = [0, 3, 6, 11, 16]  # two pairs
OF_PAIRS = np.repeat([0, 1, 2, 3], np.diff(PAIRS))


def per_token(name, call, losses, **arrays):
    """All reductions of a mean over tokens, of one micro-batch and of two replicas with two each."""
    near(name, call(), losses[TRAINED].mean())
    means = [losses[TRAINED & (DOCUMENT == d)].mean() for d in (0, 2)]  # document 1 has no label
    near(f"{name}_sequence", call(cu_seqlens=CUTS, reduction="sequence"), np.mean(means))
    near(f"{name}_constant", call(reduction="constant", reduction_constant=40.0), losses[TRAINED].sum() / 40)


def test_sft():
    logp, mean_logp, lse, weights = -RANDOM.exponential(size=(4, T))
    weights = -weights
    per_token("sft", lambda **o: reference.sft(LABELS, logp, **o), -logp)
    near("sft_smoothing", reference.sft(LABELS, logp, mean_logp=mean_logp, label_smoothing=0.2),
         (-0.8 * logp - 0.2 * mean_logp)[TRAINED].mean())
    near("sft_z_loss", reference.sft(LABELS, logp, logits_lse=lse, z_loss=0.3), (-logp + 0.3 * lse ** 2)[TRAINED].mean())
    near("sft_weights", reference.sft(LABELS, logp, weights=weights), (-logp * weights)[TRAINED].sum() / TRAINED.sum())
    cut = [slice(0, 3), slice(3, 9), slice(9, 10), slice(10, T)]
    rows = [LABELS[c] for c in cut], [logp[c] for c in cut]
    means = [-logp[c][TRAINED[c]].mean() for c in cut]
    near("sft_micro", reference.sft(*rows, reduction="micro"), np.mean(means))
    near("sft_rows", reference.sft(*rows), -logp[TRAINED].mean())
    halves = [-logp[c][TRAINED[c]].mean() for c in (slice(0, 9), slice(9, T))]
    near("sft_replica", reference.sft(*rows, replicas=2, reduction="replica"), np.mean(halves))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_pairs():
    logp, ref_logp = -RANDOM.exponential(size=(2, T))
    apart = np.where(TRAINED, logp - ref_logp, 0)
    counts = np.bincount(OF_PAIRS, TRAINED)
    h = np.bincount(OF_PAIRS, apart)
    x, by_length = h[::2] - h[1::2], (h / counts)[::2] - (h / counts)[1::2]
    policy = np.bincount(OF_PAIRS, np.where(TRAINED, logp, 0)) / counts
    z, e = 0.5 * x, 0.1
    near("dpo", reference.dpo(LABELS, logp, ref_logp, PAIRS, beta=0.5), -np.log(sigmoid(z)).mean())
    want = {"sigmoid": -np.log(sigmoid(z)) * (1 - e) - np.log(sigmoid(-z)) * e,
            "robust": (-np.log(sigmoid(z)) * (1 - e) + np.log(sigmoid(-z)) * e) / (1 - 2 * e)}
    for name, loss in want.items():
        near(f"dpo_{name}_smoothed", reference.dpo(LABELS, logp, ref_logp, PAIRS, beta=0.5, loss_type=name, label_smoothing=e), loss.mean())
    want = {"hinge": np.maximum(0, 1 - z), "ipo": (x - 1) ** 2, "ipo_mean": (by_length - 1) ** 2,
            "simpo": -np.log(sigmoid(0.5 * (policy[::2] - policy[1::2]) - 0.7))}
    for name, loss in want.items():
        near(f"dpo_{name}", reference.dpo(LABELS, logp, ref_logp, PAIRS, beta=0.5, loss_type=name, simpo_gamma=0.7), loss.mean())
    scores = logp[np.array(PAIRS[1:]) - 1]
    chosen, rejected = scores[::2], scores[1::2]
    near("rm", reference.rm(logp, PAIRS), -np.log(sigmoid(chosen - rejected)).mean())
    near("rm_center", reference.rm(logp, PAIRS, center=0.1), (-np.log(sigmoid(chosen - rejected)) + 0.1 * (chosen + rejected) ** 2).mean())
    desirable, kl = np.array([1, 0, 0, 1]), RANDOM.normal(size=4) + 1
    towards = np.where(desirable == 1, 1, -1) * (h - max(0, kl.mean()))
    near("kto", reference.kto(LABELS, logp, ref_logp, desirable, kl, PAIRS, beta=0.4), (1 - sigmoid(0.4 * towards)).mean())
    near("kto_weights", reference.kto(LABELS, logp, ref_logp, desirable, kl, PAIRS, beta=0.4, desirable_weight=1.3, undesirable_weight=0.7),
         (np.where(desirable == 1, 1.3, 0.7) * (1 - sigmoid(0.4 * towards))).mean())


def test_ppo():
    logp, old, ref = -RANDOM.exponential(size=(3, T))
    adv, entropy = RANDOM.normal(size=T), RANDOM.exponential(size=T)

    def losses(ratio, low=0.2, high=0.2):
        return np.maximum(-adv * ratio, -adv * ratio.clip(1 - low, 1 + high))
    ratio = np.exp(logp - old)
    per_token("ppo", lambda **o: reference.ppo(LABELS, logp, old, adv, **o), losses(ratio))
    near("ppo_clip", reference.ppo(LABELS, logp, old, adv, clip_low=0.1, clip_high=0.6), losses(ratio, 0.1, 0.6)[TRAINED].mean())
    kl = np.exp(ref - logp) - (ref - logp) - 1
    near("ppo_kl", reference.ppo(LABELS, logp, old, adv, ref_logp=ref, kl_coef=0.3), (losses(ratio) + 0.3 * kl)[TRAINED].mean())
    near("ppo_kl_ratio", reference.ppo(LABELS, logp, old, adv, ref_logp=ref, kl_coef=0.3, kl_ratio="token"),
         (losses(ratio) + 0.3 * ratio * kl)[TRAINED].mean())
    near("ppo_entropy", reference.ppo(LABELS, logp, old, adv, entropy=entropy, entropy_coef=0.2), (losses(ratio) - 0.2 * entropy)[TRAINED].mean())
    dual = np.where(adv < 0, np.minimum(losses(ratio), 1.3 * -adv), losses(ratio))
    near("ppo_dual_clip", reference.ppo(LABELS, logp, old, adv, dual_clip=1.3), dual[TRAINED].mean())
    near("ppo_cispo", reference.ppo(LABELS, logp, old, adv, cispo=1.1), (-np.minimum(ratio, 1.1) * adv * logp)[TRAINED].mean())
    mean = [(logp - old)[TRAINED & (DOCUMENT == d)].mean() if (TRAINED & (DOCUMENT == d)).any() else 0 for d in range(3)]
    near("ppo_of_sequences", reference.ppo(LABELS, logp, old, adv, cu_seqlens=CUTS, importance="sequence"),
         losses(np.exp(np.array(mean))[DOCUMENT])[TRAINED].mean())
    per_token("value", lambda **o: reference.value(LABELS, logp, ref, **o), (logp - ref) ** 2 / 2)
    bound = old + (logp - old).clip(-0.1, 0.1)
    near("value_clip", reference.value(LABELS, logp, ref, old_values=old, clip_value=0.1),
         np.maximum((logp - ref) ** 2, (bound - ref) ** 2)[TRAINED].mean() / 2)
    rewards, groups = np.array([1.0, 0.0, 3.0]), np.array([7, 7, 7])
    spread = rewards - rewards.mean()
    others = np.array([rewards[i] - np.delete(rewards, i).mean() for i in range(3)])
    for name, want in (("group", spread / (rewards.std() + 1e-3)), ("group_mean", spread), ("rloo", others)):
        near(f"advantages_{name}", reference.advantages(rewards, groups, CUTS, advantage=name, advantage_eps=1e-3), want[DOCUMENT])
    near("advantages_labels", reference.advantages(rewards, groups, CUTS, labels=LABELS, advantage="rloo"), np.where(TRAINED, others[DOCUMENT], 0))
    two = reference.advantages([[1.0], [0.0, 3.0]], [[7], [7, 7]], [[0, 2], [0, 1, 4]], advantage="group_mean")
    near("advantages_rows", np.concatenate(two), spread[[0, 0, 1, 2, 2, 2]])


# ---- derivatives of losses ----

def slopes(name, call, places=TRAINED, **arrays):
    """The derivatives of a loss by each of its arrays, along two directions, against differences of the loss; 0 outside of places."""
    loss, found = call(**arrays, gradient=True)
    near(f"{name}_loss", loss, call(**arrays))
    check(f"{name}_names", sorted(found) == sorted(arrays), sorted(found))
    for of, x in arrays.items():
        check(f"{name}_d{of}_zeros", not np.any(found[of][~places]) and np.all(found[of][places] != 0), found[of])
        for way in range(2):
            d = RANDOM.normal(size=x.shape)
            high, low = (call(**{**arrays, of: x + step * d}) for step in (1e-5, -1e-5))
            near(f"{name}_d{of}_{way}", (found[of] * d).sum(), (high - low) / 2e-5, 1e-8)


def test_derivatives():
    logp, old, ref, other, lse = -RANDOM.exponential(size=(5, T))
    old = logp + 0.1 * RANDOM.normal(size=T)
    adv, entropy, weights = RANDOM.normal(size=T), RANDOM.exponential(size=T), RANDOM.exponential(size=T)
    slopes("sft_slope", lambda logp, **o: reference.sft(LABELS, logp, weights=weights, **o), logp=logp)
    slopes("sft_slope_terms", lambda **o: reference.sft(LABELS, cu_seqlens=CUTS, reduction="sequence", label_smoothing=0.2, z_loss=0.3, **o),
           logp=logp, mean_logp=other, logits_lse=lse)
    slopes("ppo_slope", lambda **o: reference.ppo(LABELS, old_logp=old, advantages=adv, clip_low=0.9, clip_high=9.0, ref_logp=ref,
                                                  kl_coef=0.3, entropy_coef=0.2, **o), logp=logp, entropy=entropy)
    for loss_type, e in (("sigmoid", 0.1), ("robust", 0.2), ("hinge", 0.0), ("ipo", 0.0), ("ipo_mean", 0.0), ("simpo", 0.1)):
        slopes(f"dpo_slope_{loss_type}", lambda logp, **o: reference.dpo(LABELS, logp, ref, PAIRS, beta=0.05, loss_type=loss_type,
                                                                        label_smoothing=e, simpo_gamma=0.7, **o), logp=logp)
    slopes("rm_slope", lambda values, **o: reference.rm(values, PAIRS, center=0.1, **o), np.isin(np.arange(T) + 1, PAIRS), values=logp)
    desirable, kl = np.array([1, 0, 0, 1]), RANDOM.normal(size=4) + 1
    slopes("kto_slope", lambda logp, **o: reference.kto(LABELS, logp, ref, desirable, kl, PAIRS, beta=0.4, **o), logp=logp)
    slopes("kto_slope_weights", lambda logp, **o: reference.kto(LABELS, logp, ref, desirable, kl, PAIRS, beta=0.4, desirable_weight=1.3,
                                                                undesirable_weight=0.7, **o), logp=logp)
    slopes("value_slope", lambda values, **o: reference.value(LABELS, values, ref, **o), values=logp)
    _, found = reference.value([1, 1, 1], [0.5, 0.5, -0.5], [1.0, -1.0, -1.0], old_values=[0.0, 0.0, -0.45], clip_value=0.1, gradient=True)
    near("value_slope_clip", found["values"], [0, 1.5 / 3, 0.5 / 3])
    _, found = reference.sft([[1], [1, 1]], [[-1.0], [-2.0, -3.0]], replicas=2, reduction="replica", gradient=True)
    near("sft_slope_rows", np.concatenate(found["logp"]), [-1 / 2, -1 / 4, -1 / 4])
    _, found = reference.ppo([1, 1], [0.0, 0.0], [-1.0, -1.0], [1.0, -1.0], gradient=True)
    near("ppo_slope_clip", found["logp"], [0, np.e / 2])  # the ratio is e: beyond the clip only a loss that it would lower stops


def test_tokens():
    logits = RANDOM.normal(size=(T, 7)) * 3
    logits[2, 4] = -np.inf
    labels = np.where(TRAINED, np.arange(T) % 4, -100)
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    with np.errstate(invalid="ignore"):
        entropy = -np.where(np.isinf(logp), 0, np.exp(logp) * logp).sum(1)
    want = {"logp": np.where(TRAINED, logp[np.arange(T), np.maximum(labels, 0)], 0), "entropy": entropy,
            "logits_lse": np.log(np.exp(logits).sum(1))}
    kept = np.delete(np.arange(T), 2)  # there the mean is -Inf
    try:
        reference.log_probs(logits, labels)
        check("log_probs_infinite", False, "accepted")
    except ValueError as e:
        check("log_probs_infinite", "mean_logp becomes NaN or Inf at element 2" in str(e), e)
    got = reference.log_probs(logits[kept], labels[kept])
    for name, x in want.items():
        near(f"log_probs_{name}", got[name], x[kept])
    near("log_probs_mean_logp", got["mean_logp"], logp[kept].mean(1))
    near("log_probs_batch", reference.log_probs(logits[None, kept], labels[None, kept])["logp"], want["logp"][None, kept])
    refused("log_probs_label", "has label 7, and 0.logits a vocabulary of 7", lambda: reference.log_probs(logits[:2], [1, 7]))
    values, rewards = RANDOM.normal(size=(2, T))
    of_documents = np.array([1.0, 2.0, -0.5])
    for name, gamma, lam, token in (("token", 0.9, 0.8, True), ("document", 0.95, 1.0, False), ("plain", 1.0, 0.95, True)):
        adv = np.zeros(T)
        for d, (a, b) in enumerate(zip(CUTS, CUTS[1:])):
            last, value = 0.0, 0.0
            ends = [t for t in range(a, b) if TRAINED[t]]
            for t in range(b - 1, a - 1, -1):
                r = (rewards[t] if TRAINED[t] else 0) if token else of_documents[d] * (bool(ends) and t == ends[-1])
                v = values[t] if TRAINED[t] else 0
                last, value = r + gamma * value - v + gamma * lam * last, v
                adv[t] = last
        of = {"token_rewards": rewards} if token else {"rewards": of_documents}
        got, returns = reference.gae(LABELS, values, CUTS, gamma=gamma, gae_lambda=lam, **of)
        near(f"gae_{name}", got, np.where(TRAINED, adv, 0))
        near(f"gae_{name}_returns", returns, np.where(TRAINED, adv + values, 0))
    refused("gae_no_reward", "tensor 0.rewards is missing", lambda: reference.gae(LABELS, values, CUTS))


# ---- gradients ----

def test_gradients():
    shapes = {"a.weight": (3, 4), "b.bias": (5,)}
    g, p, m, v = ({name: RANDOM.normal(size=shape) for name, shape in shapes.items()} for _ in range(4))
    v = {name: x ** 2 for name, x in v.items()}
    size = np.sqrt(sum((x ** 2).sum() for x in g.values()))
    near("norm", reference.norm(g), size)
    near("norm_of_one", reference.norm(g["b.bias"]), np.sqrt((g["b.bias"] ** 2).sum()))
    for name in shapes:
        near(f"clip_{name}", reference.clip(g, 0.5)[name], g[name] * 0.5 / (size + 1e-6))
    near("clip_not", reference.clip(list(g.values()), 1e3)[1], g["b.bias"])
    after = reference.adamw(p, g, m, v, lr=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2, step=3, max_norm=0.5)
    first = reference.adamw(list(p.values()), list(g.values()), lr=0.1)
    sgd = reference.sgd(p, g, lr=0.1, weight_decay=0.2)
    for i, name in enumerate(shapes):
        clipped = g[name] * 0.5 / (size + 1e-6)
        mean, square = 0.8 * m[name] + 0.2 * clipped, 0.9 * v[name] + 0.1 * clipped ** 2
        step = mean / (1 - 0.8 ** 3) / (np.sqrt(square / (1 - 0.9 ** 3)) + 1e-3)
        near(f"adamw_{name}", after[name], p[name] * (1 - 0.1 * 0.2) - 0.1 * step)
        near(f"adamw_first_{name}", first[i], p[name] - 0.1 * g[name] / (abs(g[name]) + 1e-8))
        near(f"sgd_{name}", sgd[name], p[name] - 0.1 * (g[name] + 0.2 * p[name]))


# ---- a model of one layer ----

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
          "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 11, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
          "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu"}


def weights_of_a_model():
    at = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (11, 8), f"{at}input_layernorm.weight": (8,), f"{at}self_attn.q_proj.weight": (8, 8),
              f"{at}self_attn.k_proj.weight": (4, 8), f"{at}self_attn.v_proj.weight": (4, 8), f"{at}self_attn.o_proj.weight": (8, 8),
              f"{at}post_attention_layernorm.weight": (8,), f"{at}mlp.gate_proj.weight": (12, 8), f"{at}mlp.up_proj.weight": (12, 8),
              f"{at}mlp.down_proj.weight": (8, 12), "model.norm.weight": (8,), "lm_head.weight": (11, 8)}
    # float32 has them exactly
    return {name: RANDOM.normal(size=shape).astype("float32").astype(float) / (1 if len(shape) == 1 else 2) for name, shape in shapes.items()}


def rms(x, weight):
    return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-5) * weight


def rotated(x, places):
    angle = places[:, None] * 10000.0 ** (-np.arange(2) / 2)
    cos, sin, (a, b) = np.cos(angle), np.sin(angle), np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def model_logp(w, ids, labels, places, sees):
    at = "model.layers.0."
    x = w["model.embed_tokens.weight"][ids]
    y = rms(x, w[f"{at}input_layernorm.weight"])
    q, k, v = (y @ w[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
    heads = [dense(rotated(q[:, 4 * h:4 * h + 4], places), rotated(k, places), v, sees, 0.5)[0] for h in range(2)]
    x = x + np.concatenate(heads, -1) @ w[f"{at}self_attn.o_proj.weight"].T
    y = rms(x, w[f"{at}post_attention_layernorm.weight"])
    gate = y @ w[f"{at}mlp.gate_proj.weight"].T
    x = x + (gate * sigmoid(gate) * (y @ w[f"{at}mlp.up_proj.weight"].T)) @ w[f"{at}mlp.down_proj.weight"].T
    logits = rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.where(labels == -100, 0, logp[np.arange(len(ids)), labels.clip(0)])


def test_step():
    w = weights_of_a_model()
    seqpar_dump.write_llama(f"{FOLDER}/model", CONFIG, {name: x.astype("float32") for name, x in w.items()})
    ids = RANDOM.integers(0, 11, T)
    labels = np.where(np.isin(np.arange(T), [0, 4, 5, 15]), -100, np.append(ids[1:], 0))
    places = np.array([*range(5), 0, *range(10)])
    sees = (np.arange(T)[:, None] >= np.arange(T)) & (DOCUMENT[:, None] == DOCUMENT)

    def loss_of(w):
        return -model_logp(w, ids, labels, places, sees).sum() / (labels != -100).sum()
    made = reference.step(f"{FOLDER}/model", ids, labels, cu_seqlens=CUTS, optimizer="sgd", lr=0.5, max_norm=0.1)
    near("step_logp", made["logp"], model_logp(w, ids, labels, places, sees), 1e-10)
    near("step_loss", made["loss"], loss_of(w), 1e-10)
    near("step_norm", made["norm"], np.sqrt(sum((g ** 2).sum() for g in made["gradients"].values())))
    check("step_names", set(made["gradients"]) == set(w) == set(made["after"]), sorted(made["gradients"]))
    for name in w:
        towards, step = RANDOM.normal(size=w[name].shape), 1e-5
        ends = [loss_of({**w, name: w[name] + sign * step * towards}) for sign in (1, -1)]
        near(f"step_gradient_{name}", (made["gradients"][name] * towards).sum(), (ends[0] - ends[1]) / (2 * step), 1e-6)
        near(f"step_after_{name}", made["after"][name], w[name] - 0.5 * made["gradients"][name] * 0.1 / (made["norm"] + 1e-6))
    two = reference.step(f"{FOLDER}/model", [ids[:6], ids[6:]], [labels[:6], labels[6:]], cu_seqlens=[[0, 5, 6], [0, 10]])
    near("step_rows", np.concatenate(two["logp"]), made["logp"])
    check("step_without_optimizer", two["after"] == {}, two["after"].keys())


# ---- what is refused ----

def test_refusals():
    q, k = np.ones((4, 4, 8)), np.ones((4, 3, 8))
    refused("refuses_heads", "tensor 0.k has 3 heads, which do not divide the 4 heads of q", lambda: reference.attention(q, k, k))
    refused("refuses_shape", "tensor 0.q is (4, 8); write (4, heads, head_dim)", lambda: reference.attention(q[0], k, k))
    refused("refuses_nan", "has NaN or Inf", lambda: reference.attention(q * np.nan, q, q))
    refused("refuses_cu_seqlens", "tensor 0.cu_seqlens has 1 at element 0", lambda: reference.positions([1, 4]))
    refused("refuses_sp", "--sp is 5, and the longest row of index has 4 tokens", lambda: reference.split(q, 5))
    refused("refuses_layout", "--layout is 'zigzg'; give contiguous, zigzag", lambda: reference.split(q, 2, "zigzg"))
    refused("refuses_number", "a number has no tokens", lambda: reference.split(3, 2))
    refused("refuses_index", "there are 2 shares and 1 arrays of index", lambda: reference.unsplit([q, q], [np.arange(8)]))
    refused("refuses_index_twice", "4 tokens are held twice, 4 by nobody", lambda: reference.unsplit([q, q], [np.arange(4), np.arange(4)]))
    refused("refuses_lengths", "tensor 0.logp has 1 elements and 0.index 2", lambda: reference.sft([1, 2], [-1.0]))
    refused("refuses_rows", "logp has 1 micro-batches and labels has 2", lambda: reference.sft([[1], [2]], [[-1.0]]))
    refused("refuses_replicas", "replicas is 2 and there are 3 micro-batches", lambda: reference.sft([[1]] * 3, [[-1.0]] * 3, replicas=2))
    refused("refuses_partner", "a document without a partner", lambda: reference.dpo([1], [-1.0], [-1.0], [0, 1]))
    refused("refuses_constant", "reduction is 'constant' and reduction_constant is 0", lambda: reference.sft([1], [-1.0], reduction="constant"))
    refused("refuses_smoothing", "a micro-batch lacks what it is made of", lambda: reference.sft([1], [-1.0], label_smoothing=0.1))
    refused("refuses_gae", "advantage is gae; write objective ppo, and advantage group", lambda: reference.advantages([1.0], [0], [0, 1], advantage="gae"))
    refused("refuses_sequences", "with importance sequence, has no derivative",
            lambda: reference.ppo([1], [-1.0], [-1.0], [1.0], cu_seqlens=[0, 1], importance="sequence", gradient=True))
    refused("refuses_no_gradient", "tensors grad.NAME are missing", lambda: reference.norm([]))
    refused("refuses_sizes", "parameter x has 2 elements", lambda: reference.adamw(np.ones(2), np.ones(3), lr=0.1))
    refused("refuses_lr", "lr is '-0.1'; write a number from 0", lambda: reference.sgd(np.ones(2), np.ones(2), lr=-0.1))
    refused("refuses_model", "/nowhere/config.json cannot be read", lambda: reference.step("/nowhere", [1, 2], [2, -100]))
    refused("refuses_type", "arrays of complex128 are not written", lambda: reference.norm(np.ones(2, complex)))


# ---- torch ----

def test_torch():
    try:
        import torch
    except ImportError:
        print("skip reference_torch: no torch")
        return
    q, k = torch.randn(1, T, 4, 8, requires_grad=True), torch.randn(1, T, 2, 8)
    out, lse = reference.attention(q, k, k, torch.tensor(CUTS), lse=True)
    want = reference.attention(q.detach().numpy(), k.numpy(), k.numpy(), CUTS)
    check("torch_attention", out.dtype == lse.dtype == torch.float32 and out.shape == q.shape and np.array_equal(out.numpy(), want), out.shape)
    low = [x.detach().bfloat16() for x in (q, k)]
    out, lse = reference.attention(low[0], low[1], low[1], CUTS, lse=True)
    exact = reference.attention(*(x.double() for x in (low[0], low[1], low[1])), CUTS)
    check("torch_bfloat16", out.dtype == torch.bfloat16 and lse.dtype == torch.float32 and torch.equal(out, exact.bfloat16()), out.dtype)
    dq, dk, _ = reference.attention_gradient(low[0], low[1], low[1], low[0], CUTS)
    check("torch_gradient", dq.dtype == torch.bfloat16 and dq.shape == q.shape and dk.shape == k.shape, dq.shape)
    for x in (torch.randn(T, 3).bfloat16(), torch.arange(T), torch.arange(T) % 2 == 0, torch.randn(T).half()):
        shares = reference.split(x, 5)
        right = all(s.dtype == x.dtype for s in shares) and torch.equal(reference.unsplit(shares), x)
        check(f"torch_split_{x.dtype}", right and torch.equal(shares[0][0], x[0]), shares[0])
    ids = torch.arange(T)[None]
    check("torch_labels", torch.equal(reference.labels(ids), torch.cat([ids[:, 1:], torch.tensor([[-100]])], 1)), "")
    labels, logp = torch.tensor(LABELS), -torch.rand(T)
    loss = reference.sft(labels, logp)
    check("torch_loss", loss.shape == () and loss.dtype == torch.float32 and torch.allclose(loss, -logp[labels != -100].mean()), loss)
    weight = torch.nn.Parameter(torch.ones(3).bfloat16())
    after = reference.adamw({"w": weight}, {"w": torch.ones(3).bfloat16()}, lr=0.5)["w"]
    check("torch_adamw", after.dtype == torch.bfloat16 and torch.equal(after, torch.full((3,), 0.5).bfloat16()), after)
    check("torch_clip", torch.allclose(reference.clip([torch.ones(4)], 1.0)[0], torch.full((4,), 0.5)), "")
    check("torch_norm", reference.norm([torch.ones(4).bfloat16()]).dtype == torch.float32, "")


for test in (test_documents, test_layouts, test_attention, test_sft, test_pairs, test_ppo, test_derivatives, test_tokens,
             test_gradients, test_step, test_refusals, test_torch):
    test()
sys.exit(failed > 0)
