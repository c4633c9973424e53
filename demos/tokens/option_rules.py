# SPDX-License-Identifier: MIT OR Unlicense
"""Options that do not go together, and defaults that hang on others: settled before anything is
read, so that a refusal costs no time."""
import os
from .base import Refused
from .data_sets import data_files
from .dataset_info import infos_of
from .known_sets import FORM_OF_SETS
from .token_file import replaceable

MOST_CHOICES = 16  # as SEQPAR_MAX_CHOICES


def settle(o):
    """What does not go together, before anything is read; and defaults that hang on others."""
    texts = [path for files in data_files(o) for path in files if path.endswith(".txt")]
    o.plain = bool(texts)
    settle_shape(o)
    settle_pretrain(o, texts)
    settle_kind(o)
    settle_steps(o)
    settle_truncation(o)
    settle_plain(o, texts)
    if o.dataset_info is not None:
        settle_info(o)
        o.pretrain_eos = o.pretrain_blocks = False  # it says both
    settle_keys(o)
    settle_form(o)
    place_is_free(o)


def settle_shape(o):
    """One way to shape a text, and what belongs to it."""
    if o.apply_chat_template and (o.input_template is not None or o.pretrain_mode):
        other = "--pretrain_mode" if o.pretrain_mode else "--input_template"
        raise Refused(f"--apply_chat_template and {other} are two ways to shape a text; "
                      "leave out one of them")
    if o.template and (o.apply_chat_template or o.input_template is not None):
        other = "--apply_chat_template" if o.apply_chat_template else "--input_template"
        raise Refused(f"--template {o.template} and {other} are two ways to shape a text; "
                      "leave out one of them")
    if o.default_system is not None and not o.template:
        raise Refused("--default_system is written by --template; add it")
    if o.tokenizer_chat_template is not None and not o.apply_chat_template:
        raise Refused("--tokenizer_chat_template is used by --apply_chat_template; add it")


def settle_pretrain(o, texts):
    """--pretrain_mode, and which of its options needs which."""
    if o.pretrain_mode and o.output_key is not None:
        raise Refused("--pretrain_mode trains on the text of --input_key only; leave out "
                      f"--output_key {o.output_key}")
    if o.pretrain_eos > o.pretrain_mode or o.pretrain_blocks > o.pretrain_eos:
        lacks_mode = o.pretrain_eos > o.pretrain_mode
        wanted, given = ("mode", "eos") if lacks_mode else ("eos", "blocks")
        raise Refused(f"--pretrain_{given} needs --pretrain_{wanted}; add it, or leave it out")
    if o.pretrain_blocks and o.max_len < 2:
        raise Refused("--pretrain_blocks makes documents of --max_len tokens; give 2 or more")
    if o.pretrain_eos and o.plain:
        raise Refused(f"{texts[0]} is read as one text, but LLaMA-Factory's stage pt "
                      "ends every line in EOS; give a .jsonl with one text in each "
                      "record, or leave out --pretrain_eos")


def settle_kind(o):
    """Options of one kind of token file alone."""
    if o.kind == "prompts" and o.output_key is not None:
        raise Refused(f"prompts have no responses; leave out --output_key {o.output_key} "
                      "(--label_key is what a reward rule compares with)")
    if o.kind != "sft" and (o.pretrain_mode or o.train_on != "assistant"):
        raise Refused(f"{'--pretrain_mode' if o.pretrain_mode else '--train_on'} is for --kind "
                      f"sft, not for {o.kind}; leave it out")
    if o.csft_prompt is not None and o.template:
        raise Refused("--csft_prompt is appended to the text of a prompt, but --template "
                      "writes tokens; leave it out, or give --apply_chat_template")
    if o.csft_prompt is not None and o.kind != "prompts":
        raise Refused("--csft_prompt is for prompts; leave it out, or give --kind prompts")


def settle_truncation(o):
    if o.kind == "prompts" and o.truncation in ("cut", "cut_both"):
        raise Refused("a prompt that is cut asks something else; leave out --truncation "
                      f"{o.truncation}: longer prompts are dropped")
    o.truncation = o.truncation or ("drop" if o.kind == "prompts" else "cut")


def settle_plain(o, texts):
    """Files of plain text, which hold no records."""
    if o.plain and (not o.pretrain_mode or len(texts) < sum(map(len, data_files(o))) or
                    o.dataset_probs or o.max_len < 2):
        raise Refused(f"{texts[0]} is plain text, cut into documents of --max_len tokens; it "
                      "needs --pretrain_mode, other .txt files alone beside it, no "
                      "--dataset_probs, and a --max_len of 2 or more")


def settle_keys(o):
    """Keys that no option names, and whether records may say by theirs what they are."""
    o.alpaca = o.input_key is None and not o.pretrain_mode and o.dataset_info is None
    named = not o.alpaca
    if o.kind == "pairs":
        keys = (o.prompt_key, o.chosen_key, o.rejected_key)
        named = keys != (None, "chosen", "rejected")
    o.by_form = not (named or o.dataset_info is not None or o.apply_chat_template or
                     o.output_key or o.kind == "labelled")
    o.form_of_sets = o.input_template or FORM_OF_SETS
    o.input_key = o.input_key or "input"
    if o.kind == "labelled":
        o.output_key, o.label_key = o.output_key or "output", o.label_key or "label"


def settle_form(o):
    """What stands around a prompt without a chat template."""
    if o.input_template is None:
        o.input_template = "User: {}\nAssistant: "
    if "{}" not in o.input_template:
        raise Refused("--input_template must have {} once, in the place of the prompt, but has "
                      f"none: {o.input_template!r}")
    if o.input_template.count("{}") > 1:
        raise Refused("--input_template must have {} once, in the place of the prompt, but has "
                      f"it twice: {o.input_template!r}")


def settle_steps(o):
    if o.kind != "steps":
        given = "reward_tokens" if o.reward_tokens else None
        if o.placeholder_token is not None:
            given = "placeholder_token"
        if given:
            raise Refused(f"--{given} is for --kind steps, not for {o.kind}; leave it out")
        return
    for name in ("apply_chat_template", "template", "dataset_info", "input_template",
                 "output_key"):
        if getattr(o, name):
            raise Refused(f"--{name} shapes prompts and responses, but steps have one text, "
                          "which is taken as it is; leave it out")
    if not o.placeholder_token:
        raise Refused("no placeholder token; give the token after each step by "
                      "--placeholder_token")
    if o.truncation == "cut_both":
        raise Refused("--truncation cut_both needs a prompt and a response, but train_prm has "
                      "a single text; give cut or drop")
    o.reward_tokens = " ".join(o.reward_tokens or []).split()
    if o.reward_tokens and not 2 <= len(o.reward_tokens) <= MOST_CHOICES:
        raise Refused(f"--reward_tokens {' '.join(o.reward_tokens)} are "
                      f"{len(o.reward_tokens)}; give 2 to {MOST_CHOICES}")
    o.reward_tokens = " ".join(o.reward_tokens)
    o.input_key, o.label_key = o.input_key or "input", o.label_key or "label"


def settle_info(o):
    """The keys that Info gives its records."""
    keys = ("input_key", "output_key", "prompt_key", "label_key")
    given = next((name for name in keys if getattr(o, name) is not None), None)
    if given:
        raise Refused(f"--dataset_info and --{given} both name keys; leave out one of them")
    completes = all(info.format == "completion" for info in infos_of(o))
    if not (completes or o.template or o.apply_chat_template or o.pretrain_mode):
        raise Refused("--dataset_info gives conversations, which --template or "
                      "--apply_chat_template writes; add one of them")
    o.input_key = "messages"
    o.label_key = "label" if o.kind == "labelled" else None


def place_is_free(o):
    inputs = [path for files in data_files(o) for path in files]
    read = (os.path.exists(path) and os.path.samefile(path, o.output) for path in inputs)
    if os.path.exists(o.output) and any(read):
        raise Refused(f"--output {o.output} is read as data; give another name")
    if os.path.exists(o.output) and not os.path.isfile(o.output):
        raise Refused(f"--output {o.output} exists and is not a regular file; "
                      "give another name")
    if os.path.exists(o.output) and not o.overwrite:
        raise Refused(f"--output {o.output} exists already; add --overwrite "
                      "or give another name")
    if os.path.exists(o.output) and not replaceable(o.output):
        raise Refused(f"--output {o.output} exists and is not a token file, so --overwrite "
                      "does not replace it; give another name")
    if not os.path.isdir(os.path.dirname(os.path.abspath(o.output))):
        raise Refused(f"--output {o.output} is in a folder that does not exist; make it, "
                      "or give another name")
