#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# Plants known mistakes, one at a time, in a build with -DSEQPAR_FAULTS; a suite must turn red for each.
#
# Mistakes of losses under sequence parallelism that were published elsewhere (B and a number) are planted too, in the
# form they take here; the last column of the list names them:
#   B28 the first DPO loss is not ln 2              360-LLaMA-Factory's README; axolotl 2643
#   B33 every shard divides by its own token count  Megatron-LM 7452, 7513
#   B44 an all-reduce outside autograd: P too small 360-LLaMA-Factory, its SFT and DPO trainers
#   B45 means of ranks' means                       OpenRLHF 583, GPTLMLoss
#   B46 the same in the gradient, the value right   XTuner 0.1.23, reduce_loss
#   B47 backward of a gather takes its slice only   axolotl, its sequence-parallel context
#   B48 labels shifted after the split              transformers 36607; Swift 810
#   B50 NaN of a rank without a target              Megatron-LM 1764; axolotl 3026
#   B51 pads are computed with, NaN times 0         Megatron-Bridge 3117
#   B53 a mean of micro-batches' means              verl 2857; 360-LLaMA-Factory 1 and 72
#   B55 tokens of id 0 vanish                       XTuner 0.1.23, dpo
#   B60 a rank without a response token fails       slime e8d3f58f3
#   B61 a reward model's forward lacks the ring     OpenRLHF 1168
#   B64 a metric is counted on every rank           torchtitan 2983, 3280
cd "$(dirname "$0")/.." || exit 1
mkdir -p build/faults
cc=${CC:-cc}
passed=0 failed=0
suites="attn bits truth pack split numerics objective agree"
for suite in $suites; do
    $cc -std=gnu11 -O2 ${ARCH:--march=native} -fopenmp -DSEQPAR_FAULTS -I. -Ibuild -Idemos -Iverify verify/test_$suite.c -o build/faults/test_$suite -lm -lpthread 2>build/faults/$suite.log || {
        echo "FAIL faults_build_$suite: $(head -n 1 build/faults/$suite.log)"; failed=$((failed + 1)); }
done
# The controls: no suite may be red, or too slow, without a fault.
for suite in $suites; do
    if SEQPAR_FAULT=0 TEST_FIRST=1 timeout 120 build/faults/test_$suite >build/faults/0.$suite.log 2>&1; then echo "ok fault_none $suite"; passed=$((passed + 1))
    else echo "FAIL fault_none: $suite ends with $? without a fault"; failed=$((failed + 1)); fi
done
# number, suites that should notice, what is wrong, which published mistakes it is
covered=""
while IFS='|' read -r number noticing what bugs; do
    caught=""
    for suite in $noticing; do
        SEQPAR_FAULT=$number TEST_FIRST=1 timeout 120 build/faults/test_$suite >build/faults/$number.$suite.log 2>&1
        code=$?
        if [ $code -eq 1 ] || [ $code -ge 128 ] || [ $code -eq 124 ]; then caught=$suite; break; fi
    done
    if [ -n "$caught" ]; then echo "ok fault_$number $what: seen by $caught"; passed=$((passed + 1)); covered="$covered $bugs"
    else echo "FAIL fault_$number $what: not noticed by $noticing"; failed=$((failed + 1)); fi
done <<'LIST'
1|attn|a query does not see itself
2|attn|documents leak into each other
3|attn|a stale k travels on
4|attn|a step of the ring is skipped
5|attn|a dk, dv contribution is lost
6|pack|token id 0 is taken for padding|B55
7|pack|positions run on over documents
8|pack|targets are not shifted
9|split attn|zigzag halves are swapped
10|attn|states are merged without rescaling
11|attn|lse lacks the sum
12|attn|delta is dropped from the gradient
13|attn|a query head of the group is forgotten
14|attn|k is sent as v
15|attn|some queries look one key ahead
16|attn|a block is left out
17|attn|the buffer of the hop before is used again
18|bits|an owner's own part of a gradient is lost
19|bits|the norm is that of the own shard
20|truth|the head's share of a tied table is lost
21|truth|no clip
22|truth|gains decay
23|bits|updated parameters are not handed out
24|numerics|bias correction one step late
25|truth|label smoothing without its mean
26|truth|gradient times P
27|bits|a leaf in parts keeps the last only
28|truth|a chunk's last token is lost to the embedding
29|truth|a rank's loss is lost
30|bits attn|a pending value is overwritten
31|truth|a vocabulary entry is left out of dhidden
32|bits|recompute uses another layer's activations
33|bits|positions are local
34|truth|dk is turned the wrong way
35|bits|labels are shifted after the split|B48
36|attn|a window is one key too wide
37|attn|the prefix is causal
38|attn|a sink is forgotten
39|attn|dropout is forgotten in ds
40|attn|softcap without its slope
41|attn|a member's tokens lie in another's place
42|attn|copies of a kv head are not added
43|attn|every row has the documents of the first
44|attn|k of another rank is read as v
45|attn|llama3 packs the first heads every time
46|attn|dk, dv of all heads go to the first
47|attn|query heads are dealt to kv heads, not grouped
48|attn|dropout knows the own heads only
49|attn|dropout knows the own positions only
50|attn|the sum of a running softmax is not rescaled
51|attn|a merge keeps the old maximum
52|attn|the first piece's returned gradients serve all
53|attn|a block whose last key is the first seen is left out
54|split attn|striped tokens are taken for neighbours
55|attn|between steps l is kept over m
56|attn|a running state begins anew with every step
57|attn|free tiles all stand at the begin of their run
58|attn|all members of a Ulysses group get the first heads
59|attn|a member takes the sinks of the first heads
60|objective|the first DPO loss is off by a rounding|B28
61|truth|a rank divides by its own token count|B33
62|objective|derivatives of documents are divided by P|B44
63|objective|a mean of means|B45
64|objective|a rank without tokens gives NaN|B50
65|split truth|pads belong to somebody|B51
66|objective|a preference's log-prob ignores the reference of the rejected half
67|objective|a rank without tokens stays away from a sum|B60
68|objective|scores are not added over the ranks of a sequence|B61
69|objective|advantages cross into the next response
70|objective|a clipped ratio still has a gradient
71|objective|gradients are P times too small|B44 B47
72|objective|a mean of the micro-batches' means|B53
73|objective|a mean of the ranks' means, in the gradient alone|B45 B46
74|objective|a reward model attends to its own rank only|B61
75|truth|the loss shown counts every rank of a sequence|B64
76|bits|updates go into the rounded weights, not into the masters
77|attn|the last key that somebody sees stays behind
78|attn|the blocks of a second leaf are added one by one
79|attn|a block that nothing is seen of leaves a sum of -0
85|pack|rows are looked through one after the other
86|pack|a row that would be full just so is passed over
87|attn|keys stop one position before the last that sees them
88|bits|whole blocks of the caller's parameters are written, the gaps behind tensors too
89|bits|a node's gaps are taken to be those of the state
90|bits|a sum of the head that waits is taken for another
91|bits|a part of the optimizer's state is read from the tensor's beginning
92|bits|an array one element too short is accepted
93|agree|ranks that were given different things are not asked
94|agree|a batch may be split otherwise than its step
95|agree|a gradient may be given twice
96|pack split|the default number of chunks does not grow with the row
97|numerics|a product of sizes wraps around
98|numerics|text of others reaches the terminal as it is
99|pack|a row may have any number of chunks
100|numerics|half a surrogate passes for UTF-8
101|numerics|a long sentence loses its end, which says what to do
102|agree|a gradient begins anew where a micro-batch has no token
103|attn|a stack has room for 64 values
104|agree|ranks that were given one device at once both take it
LIST
for bug in B28 B33 B44 B45 B46 B47 B48 B50 B51 B53 B55 B60 B61 B64; do
    if [[ " $covered " = *" $bug "* ]]; then echo "ok published_$bug"; passed=$((passed + 1)); else echo "FAIL published_$bug: no planted fault stands for it and is seen"; failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
