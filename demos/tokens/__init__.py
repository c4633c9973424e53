# SPDX-License-Identifier: MIT OR Unlicense
"""Texts to tokens: the modules of demos/prepare.py. Each uses only modules above it.

    base             refusals, strict JSON, bytes
    token_file       the file that is written
    messages         a record's messages, in the forms that data sets have
    known_sets       data sets that are known by the keys of their records
    dataset_info     data sets that LLaMA-Factory's dataset_info.json describes
    data_sets        files and folders as records, or as plain text
    model_folder     a model's tokenizer, and what its folder says of it
    drafts           documents that wait for the tokenizer, and how long ones are cut
    chat_template    conversations by a model's own template
    named_template   conversations by a template of LLaMA-Factory's
    encoder          drafts as tokens
    reader           records as drafts
    maker            records as documents: what one process does
    processes        several of them, in order
    fill             documents into the token file
    option_rules     options that do not go together
"""
