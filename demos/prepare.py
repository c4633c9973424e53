#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Unlicense
"""Texts to tokens: a data set and a model's folder become one token file, which the trainers read in the place of text.

    python3 demos/prepare.py --pretrain FOLDER --dataset train.jsonl --input_key messages --apply_chat_template \\
        --output train.tokens

The folder's tokenizer.json and chat template decide what the tokens are; demos/trainer/data/token_file.h says what the file is like.
Needs Python 3.9 and the packages tokenizers and jinja2 (for .parquet also pyarrow).

A document is the chat template's text of a conversation or, without --apply_chat_template, prompt and response:

  chat      The whole text is tokenized once, and character spans become tokens by the tokenizer's offsets, so a token is what
            it is in the model's own use. What the assistant says is what the template marks by {% generation %}; where it
            marks nothing, the text that a turn adds behind the generation prompt, up to its stop token.
  no chat   Prompt and response are tokenized apart, so that a prompt has the same tokens here and where a text is sampled for
            it. What a tokenizer puts before a text (a space, often) it does not put before the response, which goes on in a
            text. What its post-processor puts before a text (BOS, if anything) stands before the prompt; EOS ends the response,
            once, whatever the post-processor does.

Messages are {"role", "content"}, where content may be a list of parts of text, or ShareGPT's {"from", "value"}. A record with
"instruction" is Alpaca's, if no --input_key is given: its prompt is instruction and input below each other, its response output.
OpenOrca, full-hh-rlhf, oasst1_pairwise_rlhf_reward, chatbot_arena_conversations and webgpt_comparisons are known by their keys, if no
option names keys, and read as OpenRLHF 0.2 read them; of each there is a notice.
Pairs without a key of the prompt begin with it: it ends at the last "Assistant:" of both, or where the first turn or word differs.

--template NAME writes conversations as LLaMA-Factory 0.9.5 does: what stands before an answer and the answer are tokenized
apart, a piece at a time, and the answer is learnt with all that the template puts behind it. --dataset_info says of each set
what LLaMA-Factory's dataset_info.json says of it.

--train_on says what is learnt: assistant, what the assistant says in every turn; last, in the last turn alone; all, every token.
Pairs and labelled responses are always about the last turn, and end with its stop token.

--kind steps is for process reward models: the text is tokenized as it is, without BOS and EOS, and each --placeholder_token in it has
a label: one of --reward_tokens (without these any token), or a number from 0 to 1, the share of the first of two of them.
"""
import argparse
import collections
import datetime
import math
import os
import resource
import signal
import sys

sys.dont_write_bytecode = True  # a run leaves nothing beside the sources
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # python -I does not
from tokens.base import ALL_SAMPLES, Refused, little, shown  # noqa: E402
from tokens.fill import make_blocks, make_groups, make_records, make_stream  # noqa: E402
from tokens.maker import Maker  # noqa: E402
from tokens.named_template import TEMPLATES  # noqa: E402
from tokens.option_rules import settle  # noqa: E402
from tokens.processes import BATCH, Progress  # noqa: E402
from tokens.token_file import CHOICES, KINDS, OFFSETS, TokenFile  # noqa: E402


def weights(text):
    found = [float(one) for one in text.split(",")]
    if not all(math.isfinite(one) and one >= 0 for one in found) or not sum(found) > 0:
        raise ValueError
    return found


def whole(low):
    def number(text):
        if int(text) < low:
            raise ValueError
        return int(text)
    number.__name__ = f"whole number from {low} on"
    return number


def options_of(arguments):
    p = argparse.ArgumentParser(prog="prepare.py", description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pretrain", required=True, metavar="FOLDER",
                   help="the model's folder, with tokenizer.json")
    p.add_argument("--dataset", required=True, metavar="DATA",
                   help="a comma list of .jsonl, .json (both also .gz), .parquet or (with "
                        "--pretrain_mode) .txt, folders, or json@FOLDER")
    p.add_argument("--output", required=True, metavar="FILE",
                   help="the token file that is written")
    p.add_argument("--kind", choices=KINDS, default="sft",
                   help="sft (train_sft, train_kd, --pretrain_data), pairs (train_dpo, "
                        "train_rm), labelled (train_kto), prompts (train_ppo, "
                        "generate), steps (train_prm)")
    p.add_argument("--input_key",
                   help="key of the prompt, of all text, or of a list of messages "
                        "(input); a.b is b inside a")
    p.add_argument("--output_key",
                   help="key of the response; sft without it: the input is all there "
                        "is; labelled: output")
    p.add_argument("--prompt_key",
                   help="pairs: key of the prompt; without it chosen and "
                        "rejected begin with it")
    p.add_argument("--chosen_key", default="chosen", help="pairs: key of the better response")
    p.add_argument("--rejected_key", default="rejected",
                   help="pairs: key of the worse response")
    p.add_argument("--margin_key", default="margin",
                   help="pairs: key of the margin, where records have one")
    p.add_argument("--label_key",
                   help="labelled: key of true or false (label); steps: of the list of labels "
                        "(label); prompts: key of the right answer")
    p.add_argument("--placeholder_token", metavar="TOKEN",
                   help="steps: the token after each step, which has the label")
    p.add_argument("--reward_tokens", metavar="TOKENS", nargs="+",
                   help="steps: the tokens that can be labels; without it, any; "
                        "numbers as labels need two")
    p.add_argument("--apply_chat_template", action="store_true",
                   help="format texts and lists of messages by the chat template")
    p.add_argument("--tokenizer_chat_template", metavar="TEXT_OR_FILE",
                   help="a chat template to use in place of the folder's")
    p.add_argument("--template", choices=sorted(TEMPLATES), metavar="NAME",
                   help="format conversations as LLaMA-Factory 0.9.5 does by this name, in "
                        f"place of a chat template: {', '.join(sorted(TEMPLATES))}")
    p.add_argument("--default_system",
                   help="system message of records without one, in place of the "
                        "template's own")
    p.add_argument("--dataset_info", metavar="JSON",
                   help="a list with an object for each data set, as in LLaMA-Factory's "
                        "dataset_info.json: formatting, columns, tags; also max_samples, and "
                        "blocks: true for plain text in documents of --max_len "
                        "tokens (seqpar writes it)")
    p.add_argument("--input_template",
                   help="template of the prompt, which replaces {}, without a chat template "
                        "(User: {}\\nAssistant: )")
    p.add_argument("--csft_prompt", metavar="TEXT",
                   help="text that asks for a reward, appended to each prompt with a space")
    p.add_argument("--train_on", choices=("assistant", "last", "all"), default="assistant",
                   help="sft: train on all turns of the assistant, on the last one, or "
                        "on every token (assistant)")
    p.add_argument("--pretrain_mode", action="store_true",
                   help="sft: train on every token of the input, without adding EOS")
    p.add_argument("--pretrain_eos", action="store_true",
                   help="with --pretrain_mode: EOS ends each text, unless it is cut, as in "
                        "LLaMA-Factory's stage pt")
    p.add_argument("--pretrain_blocks", action="store_true",
                   help="with --pretrain_eos: texts follow each other in documents of "
                        "--max_len tokens, as in that stage with packing; the "
                        "last tokens are left out")
    p.add_argument("--max_len", type=whole(0), default=1024,
                   help="longest document or prompt, in tokens; 0: no limit (1024)")
    p.add_argument("--truncation", choices=("drop", "cut", "cut_both"),
                   help="drop longer ones, cut their end as in OpenRLHF, or cut the ends of "
                        "prompt and response as in LLaMA-Factory (cut; prompts: drop)")
    p.add_argument("--max_samples", type=whole(1), default=ALL_SAMPLES,
                   help="use at most this many records, after mixing")
    p.add_argument("--split", choices=("train", "test"), default="train",
                   help="which files of a folder are read (train)")
    p.add_argument("--dataset_probs", type=weights,
                   help="a weight for each data set: each record is taken from one drawn by "
                        "weight, in order, until the one drawn is exhausted; without it "
                        "they are read one after the other, the same number of each if "
                        "--max_samples is smaller than their sum")
    p.add_argument("--seed", type=whole(0), default=42, help="of --dataset_probs (42)")
    p.add_argument("--workers", type=whole(1), default=os.cpu_count() or 1,
                   help="processes; the file does not depend on them")
    p.add_argument("--overwrite", action="store_true",
                   help="replace an existing token file")
    return p.parse_args(arguments)


def summary(counts, tokens, kind):
    what = "pairs" if kind == "pairs" else "records"
    text = (f"{counts['read']} {what} read, {counts['kept']} kept with {tokens} tokens, "
            f"{counts['supervised']} of them supervised; {counts['dropped_long']} too long, "
            f"{counts['zero_length']} empty, {counts['cut']} cut, "
            f"{counts['fully_masked']} fully masked")
    return text + (f", {counts['identical']} identical, "
                   f"{counts['two_prompts']} with two prompts" if kind == "pairs" else "")


def notices(o, maker, counts):
    yield from maker.folder.notices()
    if counts["lapsed"]:
        yield (f"in {counts['lapsed']} records user and assistant do not speak by turns, or "
               "too few or too many times; they are left out, as LLaMA-Factory does")
    if counts["merged"] or counts["apart"]:
        yield (f"in {counts['merged']} places a prompt's last characters and the answer's "
               f"first are one token, and {counts['apart']} of {-(-counts['read'] // BATCH)} "
               "prompts that were looked at have other tokens alone, as texts are sampled for "
               "them; a template that ends prompts in a special token, or a "
               "line, has none of this")
    for key in counts:
        if key.startswith("set ") and counts[key]:
            form = "" if "rlhf" in key else f", with prompts in the form {o.form_of_sets!r}"
            yield (f"{counts[key]} records were read as {key[4:]}, as OpenRLHF 0.2 read that "
                   f"set{form}; options that name keys say otherwise")
    if counts["ties"]:
        yield (f"{counts['ties']} pairs are ties and were left out (OpenRLHF 0.2 took the "
               "second answer for the better one)")
    if counts["asked_twice"] * 2 > counts["read"]:
        yield (f"in {counts['asked_twice']} of {counts['read']} pairs both responses begin "
               "with the prompt; if that is their prompt, leave out --prompt_key")
    if counts["unknown"]:
        yield f"{counts['unknown']} documents hold characters that the tokenizer does not know"
    answers = o.kind != "prompts" and o.train_on != "all"
    by_chat = o.apply_chat_template and not o.template
    if answers and by_chat and not maker.template.stops_turns():
        yield ("the chat template ends what the assistant says in none of "
               f"{', '.join(maker.template.stops)}, where sampling stops; name its token in "
               "generation_config.json's eos_token_id, or nothing learns to stop")


# what the documents do not hang on, or what follows
NOT_SHOWN = ("workers", "output", "overwrite", "plain", "alpaca", "by_form", "form_of_sets")


def about(o, counts, summed):
    shown = {key: value for key, value in vars(o).items() if key not in NOT_SHOWN}
    return {"options": shown, "counts": dict(counts), "summary": summed}


def way(o, maker):
    """How documents come into the file."""
    if o.plain:
        return make_stream
    if maker.blocks():
        return make_groups
    return make_blocks if o.pretrain_blocks else make_records


def prepare(arguments):
    o = options_of(arguments)
    settle(o)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # the same in all processes
    now = datetime.datetime.now().replace(minute=0, second=0, microsecond=0)
    maker, file = Maker(o, now), TokenFile(o.output)
    counts, progress = collections.Counter(), Progress()
    try:
        way(o, maker)(o, now, maker, file, counts, progress)
    finally:
        seconds = progress.end()
    tokens = file.sections[OFFSETS].at if file.sections else 0
    said = summary(counts, tokens, o.kind)
    if not counts["kept"]:
        raise Refused(f"{o.dataset}: nothing is left ({said}); raise "
                      "--max_len, or check the data")
    if o.kind != "prompts" and not counts["supervised"]:
        raise Refused(f"{o.dataset}: no supervised token in the whole set ({said}); raise "
                      "--max_len, or check the data")
    if o.kind == "steps":
        file.add({CHOICES: little("i", maker.choices.values())})
    file.write(o.kind, maker.folder, about(o, counts, said))
    for notice in notices(o, maker, counts):
        print(f"notice: {shown(notice)}", file=sys.stderr)
    print(f"{o.output}: {o.kind}, {said}; {tokens / max(seconds, 1e-9):,.0f} tokens/s")


def half_the_memory():
    """The most that one process may take: a template that doubles a text gets a sentence, and
    the machine stays alive."""
    limit, hard = resource.getrlimit(resource.RLIMIT_DATA)
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") // 2
    most = half if limit == resource.RLIM_INFINITY else min(half, limit)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def main():
    # so that temporary files go
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    half_the_memory()
    try:
        prepare(None)
    except Refused as why:
        print(f"error: {shown(why)}", file=sys.stderr)
        sys.exit(2)
    except ImportError as why:
        print(f"error: {shown(why)}; pip install tokenizers jinja2", file=sys.stderr)
        sys.exit(2)
    except MemoryError:
        print("error: there is no memory left; give the data as one object per "
              "line, or lower --workers", file=sys.stderr)
        sys.exit(1)
    except OSError as why:
        print(f"error: {shown(why.filename or 'the output')}: {why.strerror}; "
              "nothing was written", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
