# SPDX-License-Identifier: MIT OR Unlicense
"""Title: UlyssesSPAttentionHF with sdpa: tokens of packed documents see the documents before
them
Packages: deepspeed transformers torch
Mistake: documents_ignored
Expected: the logits of one rank, on which transformers makes a mask from position_ids that
begin again; or a refusal.
Why: the wrapper sets attention_mask to None and gathers position_ids, which sdpa's function
does not look at: only flash attention finds documents in them. Its assertion says that
positions of packed sequences must begin again, and nothing says that sdpa ignores it.
"""
import os

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="29556")
import torch


def model():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa"))


def main(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    deepspeed.init_distributed("gloo")
    ids = torch.randint(64, (1, 32), generator=torch.Generator().manual_seed(1))
    # documents of 10 and 22 tokens
    positions = torch.cat((torch.arange(10), torch.arange(22)))[None]
    with torch.no_grad():
        # each document on its own
        apart = torch.cat([model()(input_ids=x).logits for x in (ids[:, :10], ids[:, 10:])], 1)
        one = model()(input_ids=ids, position_ids=positions, use_cache=False).logits
        sharded = model()
        UlyssesSPAttentionHF.register_with_transformers(sharded, "sdpa",
                                                        sequence_parallel_size=2,
                                                        micro_batch_size=1)
        own = slice(rank * 16, rank * 16 + 16)
        two = sharded(input_ids=ids[:, own], position_ids=positions[:, own],
                      use_cache=False).logits
    distance = lambda a, b: float((a - b).norm() / b.norm())
    print(f"rank {rank}, away from each document on its own: one rank "
          f"{distance(one[:, own], apart[:, own]):.1e}, Ulysses at sp 2 "
          f"{distance(two, apart[:, own]):.1e}", flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
