# SPDX-License-Identifier: MIT OR Unlicense
"""Title: cp_size > 1 with a model of transformers: its sliding window is dropped
Packages: nemo-automodel transformers torch
Ranks: one process
Mistake: window_missing
Expected: a window that arrives, or a refusal, as accelerate has it since its pull request 4177.
Why: attach_context_parallel_hooks (components/distributed/context_parallel/utils.py, 170 to 194
in 0.7.0) sets attention_mask to None and is_causal to True in every self_attn. SDPA has a
model's window in its mask alone, so that each layer attends to all tokens before its own.
supports_cp (_transformers/capabilities.py, 245) says yes of every model that is transformers'
own class and has SDPA: Mistral, Ministral, Gemma 3, Cohere 2, Olmo 3. The hooks come from
accelerate, which now refuses models with sliding or chunked layers. The fix is that refusal in
validate_for_mesh.
In the repro nothing is distributed: the hooks alone change the logits of a model with a window.
With two ranks, the logits are as far from those of one rank without hooks.
"""
from types import SimpleNamespace

import torch
from nemo_automodel._transformers.capabilities import validate_for_mesh
from nemo_automodel.components.distributed.context_parallel.utils import (
    attach_context_parallel_hooks)
from transformers import MistralConfig, MistralForCausalLM


def main(window):
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=64, hidden_size=32, intermediate_size=48,
                           num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                           sliding_window=window, attn_implementation="sdpa")
    model, ids = MistralForCausalLM(config), torch.randint(0, 64, (1, 24))
    want = model(input_ids=ids).logits
    validate_for_mesh(model, SimpleNamespace(cp_size=2))  # raises nothing
    attach_context_parallel_hooks(model)
    away = (model(input_ids=ids).logits - want).norm() / want.norm()
    print(f"sliding_window {window}: logits with the hooks of cp_size 2 {float(away):.1e} away")


if __name__ == "__main__":
    main(None)
    main(4)
