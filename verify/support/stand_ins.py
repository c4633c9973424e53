# SPDX-License-Identifier: MIT OR Unlicense
"""stand_ins.py FOLDER RECORDS - small data sets and models in the form of those that the pages name.

FOLDER gets NAME.jsonl of each set, with the keys, the types and the shape of the real one's records; what they say is arithmetic.
And llama, llama3 and mixtral, folders of such models with a tokenizer: one layer, random weights. All are drawn by fixed seeds."""
import array
import json
import math
import os
import random
import struct
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LLAMA2 = ("{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} </s>"
          "{% endif %}{% endfor %}")
LLAMA3 = ("{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
          "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
KINDS = {"llama": ("<s>", "</s>", [], LLAMA2), "mixtral": ("<s>", "</s>", [], LLAMA2),
         "llama3": ("<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"], LLAMA3)}


def question(draw):
    a, b = draw.randrange(100), draw.randrange(100)
    return f"{a}+{b}?", str(a + b), str(a + b + draw.randrange(1, 9))


def said(role, content):
    return {"content": content, "role": role}


def records(draw, n):
    """Of each set n records, and one conversation of several turns among them where the set has such."""
    for i in range(n):
        asked, right, wrong = question(draw)
        more, right2, wrong2 = question(draw)
        two = i % 5 == 3
        talk = f"\n\nHuman: {asked}\n\nAssistant: {right}\n\nHuman: {more}\n\nAssistant:" if two else f"\n\nHuman: {asked}\n\nAssistant:"
        good, bad = (f" It is {right2 if two else right}.", f" It is {wrong2 if two else wrong}.")
        turns = [said("user", asked), said("assistant", right), said("user", more)] if two else [said("user", asked)]
        chats = [[*turns, said("assistant", answer.strip())] for answer in (good, bad)]
        first = i % 2
        yield {
            "OpenOrca": {"id": f"cot.{i}", "system_prompt": "Be short." if i % 3 else "", "question": asked, "response": good.strip()},
            "hh-rlhf": {"chosen": talk + good, "rejected": talk + bad},
            "full-hh-rlhf": {"prompt": talk, "response": good, "chosen": good, "rejected": bad},
            "oasst1_pairwise_rlhf_reward": {"lang": "en", "parent_id": f"p{i}", "prompt": f"prompter:{asked}", "chosen": good.strip(),
                                            "rejected": bad.strip()},
            "chatbot_arena_conversations": {
                "question_id": f"q{i}", "model_a": "a", "model_b": "b", "winner": "tie" if i % 7 == 5 else "model_b" if first else "model_a",
                "conversation_a": chats[first], "conversation_b": chats[1 - first], "turn": 1 + two, "language": "English"},
            "webgpt_comparisons": {"question": {"dataset": "eli5", "id": f"w{i}", "full_text": asked},
                                   "answer_0": (bad if first else good).strip(), "answer_1": (good if first else bad).strip(),
                                   "score_0": -0.5 if first else 0.5, "score_1": 0.5 if first else -0.5},
            "preference_dataset_mixture2_and_safe_pku": {"chosen": chats[0], "rejected": chats[1], "chosen_score": 7.5, "rejected_score": 2.0},
            "prompt-collection-v0.1": {"dataset": "arithmetic", "context_messages": turns, "context": talk}}


WIDTH, HEADS, INNER, EXPERTS = 24, 4, 40, 4


def config(kind, vocab):
    names = {"mixtral": ("MixtralForCausalLM", "mixtral")}.get(kind, ("LlamaForCausalLM", "llama"))
    made = {"architectures": [names[0]], "model_type": names[1], "hidden_act": "silu", "num_hidden_layers": 1, "hidden_size": WIDTH,
            "num_attention_heads": HEADS, "num_key_value_heads": HEADS if kind == "llama" else HEADS // 2, "intermediate_size": INNER,
            "vocab_size": vocab, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            "rope_theta": {"llama": 1e4, "llama3": 5e5, "mixtral": 1e6}[kind], "bos_token_id": 256, "eos_token_id": 257}
    return {**made, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None} if kind == "mixtral" else made


def shapes(c):
    head, layer = WIDTH // HEADS, "model.layers.0."
    yield "model.embed_tokens.weight", (c["vocab_size"], WIDTH)
    for name, rows in (("q", HEADS), ("k", c["num_key_value_heads"]), ("v", c["num_key_value_heads"])):
        yield f"{layer}self_attn.{name}_proj.weight", (rows * head, WIDTH)
    yield layer + "self_attn.o_proj.weight", (WIDTH, HEADS * head)
    if c["model_type"] == "llama":
        inner = [f"{layer}mlp.{name}_proj.weight" for name in ("gate", "down", "up")]
    else:
        yield layer + "block_sparse_moe.gate.weight", (EXPERTS, WIDTH)
        inner = [f"{layer}block_sparse_moe.experts.{e}.w{i}.weight" for e in range(EXPERTS) for i in (1, 2, 3)]
    for i, name in enumerate(inner):
        yield name, (WIDTH, INNER) if i % 3 == 1 else (INNER, WIDTH)
    for name in (layer + "input_layernorm.weight", layer + "post_attention_layernorm.weight", "model.norm.weight"):
        yield name, (WIDTH,)
    yield "lm_head.weight", (c["vocab_size"], WIDTH)


def model(folder, kind, vocab):
    c, draw, header, data = config(kind, vocab), random.Random(kind), {}, b""
    for name, shape in shapes(c):
        n, spread = math.prod(shape), 1 / math.sqrt(shape[-1])
        values = array.array("f", (draw.gauss(0, spread) if len(shape) > 1 else 1.0 for _ in range(n)))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * n]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    with open(os.path.join(folder, kind, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    with open(os.path.join(folder, kind, "config.json"), "w") as file:
        json.dump(c, file)


def tokenizer(folder, kind):
    """Bytes, and the special tokens of such models: how many there are."""
    begin, end, more, template = KINDS[kind]
    words = Tokenizer(models.BPE({word: i for i, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([begin, end, *more])
    words.save(os.path.join(folder, kind, "tokenizer.json"))
    with open(os.path.join(folder, kind, "tokenizer_config.json"), "w") as file:
        json.dump({"bos_token": begin, "eos_token": end, "chat_template": template}, file)
    return words.get_vocab_size()


def main():
    folder, n = sys.argv[1], int(sys.argv[2])
    draw, sets = random.Random(11), {}
    for of_sets in records(draw, n):
        for name, record in of_sets.items():
            sets.setdefault(name, []).append(record)
    for name, listed in sets.items():
        with open(os.path.join(folder, f"{name}.jsonl"), "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in listed)
    for kind in KINDS:
        os.makedirs(os.path.join(folder, kind))
        model(folder, kind, tokenizer(folder, kind))


main()
