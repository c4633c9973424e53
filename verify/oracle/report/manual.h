/* SPDX-License-Identifier: MIT OR Unlicense */
/* manual.h - prints the manual page and shell completions, from the same tables of verbs and
 * options as help and parsing. */
#ifndef ORACLE_MANUAL_H
#define ORACLE_MANUAL_H
#include "options.h"
#include "seqpar.h"
#include "oracle/verdict/verdict.h"

typedef struct verb {
    const char *name, *help;
    int (*run)(void);
} verb;

typedef struct manual {
    const verb *verbs;
    int verb_count;
    const option *options;
    int option_count;
    const char *const *shells; /* ends with NULL */
} manual;

static const struct {
    verdict_kind code;
    const char *text;
} exit_codes[] = {{VERDICT_RIGHT, "right"},
                  {VERDICT_WRONG, "wrong"},
                  {VERDICT_USAGE, "usage"},
                  {VERDICT_FILE, "file"},
                  {VERDICT_INSUFFICIENT, "insufficient"},
                  {VERDICT_MARGINAL, "marginal or close with --strict"},
                  {VERDICT_VOID, "two references of the oracle disagree"},
                  {VERDICT_SURVIVED, "a mutant survived"}};
enum { EXIT_CODES = sizeof exit_codes / sizeof *exit_codes };

/* Whether the verb has the option. An option with verb "" is one of all verbs. */
static inline int option_is_of(const option *o, const char *verb_name) {
    return !*o->verb || !strcmp(o->verb, verb_name);
}

/* What a shell offers as completion of an option's value. */
enum { OFFER_NOTHING, OFFER_WORDS, OFFER_FILES, OFFER_FOLDERS };
static inline int option_offers(const option *o) {
    static const char *const folders[] = {"DUMP", "FOLDER", "DIR"};
    const char *what = o->kind == OPTION_NAME ? o->name : o->value;
    if (o->words) return OFFER_WORDS;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        if (!strcmp(what, folders[i])) return OFFER_FOLDERS;
    return !strcmp(what, "FILE") ? OFFER_FILES : OFFER_NOTHING;
}

/* ---- the manual page ---- */

/* Prints text escaped for roff: hyphens stay ASCII, so that options can be copied, and a . or '
   at the beginning is no request. */
static inline void roff_print(const char *text) {
    if (*text == '.' || *text == '\'') printf("\\&");
    for (; *text; text++) printf(*text == '-' ? "\\-" : *text == '\\' ? "\\e" : "%c", *text);
}

static inline void roff_line(const char *request, const char *text) {
    printf("%s%s", request, *request ? " " : "");
    roff_print(text);
    printf("\n");
}

/* Prints --name in bold and VALUE in italics; of a positional argument, NAME in italics. */
static inline void roff_option(const option *o) {
    printf("%s", o->kind == OPTION_NAME ? "\\fI" : "\\fB");
    if (o->kind != OPTION_NAME) roff_print("--");
    roff_print(o->name);
    printf("\\fR");
    if (*o->value) printf(" \\fI");
    roff_print(o->value);
    if (*o->value) printf("\\fR");
}

static inline void roff_synopsis(const manual *m, const verb *v) {
    printf(".TP\n\\fBseqpar\\-verify %s\\fR", v->name);
    for (int i = 0; i < m->option_count; i++) {
        if (!option_is_of(&m->options[i], v->name)) continue;
        printf(m->options[i].kind == OPTION_NAME ? " " : " [");
        roff_option(&m->options[i]);
        printf(m->options[i].kind == OPTION_NAME ? "" : "]");
    }
    printf("\n");
    roff_line("", v->help);
}

static inline void roff_verb(const manual *m, const verb *v) {
    roff_line(".SS", v->name);
    roff_line("", v->help);
    for (int i = 0; i < m->option_count; i++) {
        char words[400];
        if (!option_is_of(&m->options[i], v->name)) continue;
        printf(".TP\n");
        roff_option(&m->options[i]);
        printf("\n");
        option_text(&m->options[i], words, sizeof words);
        roff_line("", words);
    }
}

static const struct {
    const char *name, *text;
} manual_files[] =
    {{"DUMP/*.safetensors", "what the ranks of a training step wrote down, a file a rank; "
                            "help(seqpar_dump) of Python says what is in it"},
     {"OUT/got, OUT/want, OUT/model",
      "what gen makes: the step on ranks, the right step on one rank, the model as a Llama "
      "folder"}},
  manual_examples[] = {
      {"seqpar-verify law --norm --got 0.25 --want 1 --sp 4",
       "a gradient norm that is a quarter of one rank's: wrong: over_sp"},
      {"seqpar-verify ver dump --want dump_sp1",
       "a step on ranks against the same step on one rank"},
      {"seqpar-verify ver dump --model llama_folder --strict --junit verdict.xml",
       "against the model in fp64, as test cases for CI; no pass without gradients"},
      {"seqpar-verify gen --out case --mistake shift_after_split",
       "a step with a mistake in it, to try it out"},
      {"seqpar-verify on_policy dump",
       "log-probs of the sampler against those of training, before any update"},
      {"seqpar-verify mutants --score \"python compare.py\"",
       "which mistakes a test of your own would see"}};

static inline void roff_pairs(const char *title, const char *name, const char *text) {
    if (title) roff_line(".SH", title);
    printf(".TP\n\\fB");
    roff_print(name);
    printf("\\fR\n");
    roff_line("", text);
}

/* Words that can be given instead of a verb. */
static const struct {
    const char *name, *value, *help;
} manual_words[] = {{"--help", "", "lists verbs, or the options of a verb"},
                    {"--man", "", "prints the manual page, in roff"},
                    {"--completion", "SHELL", "prints a script for bash or zsh"}};
enum { MANUAL_WORDS = sizeof manual_words / sizeof *manual_words };

/* Verbs, options and exit codes come from the tables of --help, so that the two cannot
   differ. */
static inline int manual_print(const manual *m) {
    char code[8];
    printf(".\\\" SPDX-License-Identifier: MIT OR Unlicense\n"
           ".TH SEQPAR\\-VERIFY 1 \"\" \"seqpar %s\" \"seqpar\"\n.SH NAME\n"
           "seqpar\\-verify \\- says whether a framework's sequence parallelism is right and, "
           "if not, which mistake it is\n.SH SYNOPSIS\n",
           SEQPAR_VERSION);
    for (int i = 0; i < m->verb_count; i++) roff_synopsis(m, &m->verbs[i]);
    for (int i = 0; i < MANUAL_WORDS; i++) {
        printf(".TP\n\\fBseqpar\\-verify ");
        roff_print(manual_words[i].name);
        printf("\\fR \\fI%s\\fR\n", manual_words[i].value);
        roff_line("", manual_words[i].help);
    }
    printf(".SH VERBS\n");
    for (int i = 0; i < m->verb_count; i++) roff_verb(m, &m->verbs[i]);
    for (int i = 0; i < EXIT_CODES; i++) {
        snprintf(code, sizeof code, "%d", exit_codes[i].code);
        roff_pairs(i ? NULL : "EXIT STATUS", code, exit_codes[i].text);
    }
    for (size_t i = 0; i < sizeof manual_files / sizeof *manual_files; i++)
        roff_pairs(i ? NULL : "FILES", manual_files[i].name, manual_files[i].text);
    for (size_t i = 0; i < sizeof manual_examples / sizeof *manual_examples; i++)
        roff_pairs(i ? NULL : "EXAMPLES", manual_examples[i].name, manual_examples[i].text);
    return 0;
}

/* ---- bash ---- */

static inline void shell_words(const char *const *words) {
    for (int i = 0; words[i]; i++) printf("%s%s", i ? " " : "", words[i]);
}

/* Prints what bash offers as an option's value or as a positional argument. */
static inline void bash_offer(const option *o) {
    if (option_offers(o) == OFFER_FOLDERS) printf("of=folders");
    if (option_offers(o) == OFFER_FILES) printf("of=files");
    if (option_offers(o) == OFFER_NOTHING) printf("of=nothing");
    if (option_offers(o) != OFFER_WORDS) return;
    printf("words=\"");
    shell_words(o->words);
    printf("\"");
}

static inline void bash_values(const manual *m) {
    printf("    case \"$verb $before\" in\n        \"--completion --completion\") words=\"");
    shell_words(m->shells);
    printf("\" ;;\n");
    for (int i = 0; i < m->option_count; i++) {
        const option *o = &m->options[i];
        if (o->kind == OPTION_FLAG || o->kind == OPTION_NAME) continue;
        printf(*o->verb ? "        \"%s --%s\") " : "        *\"%s --%s\") ", o->verb, o->name);
        bash_offer(o);
        printf(" ;;\n");
    }
    printf("        *) of=verb ;;\n    esac\n");
}

static inline void bash_verbs(const manual *m) {
    printf("    [ \"$of\" != verb ] || case \"$verb\" in\n");
    for (int k = 0; k < m->verb_count; k++) {
        const option *first = NULL, *named = NULL; /* first, last positional argument */
        printf("        %s) words=\"--help", m->verbs[k].name);
        for (int i = 0; i < m->option_count; i++) {
            const option *o = &m->options[i];
            if (!option_is_of(o, m->verbs[k].name)) continue;
            if (o->kind == OPTION_NAME && !first) first = o;
            if (o->kind == OPTION_NAME)
                named = o;
            else
                printf(" --%s", o->name);
        }
        printf("\"");
        if (named) printf("; [[ $word == -* ]] || { ");
        if (named && option_offers(named) != OFFER_WORDS) printf("words=; ");
        if (named) bash_offer(named);
        if (first != named) printf("; [ \"$COMP_CWORD\" -ne 2 ] || { of=; ");
        if (first != named) bash_offer(first);
        printf("%s%s ;;\n", first != named ? "; }" : "", named ? "; }" : "");
    }
    printf("    esac\n");
}

/* The script sets `words` to the candidates, or `of` to the kind of value: folders, files,
   nothing; `verb` means that the word is no option's value. */
static inline int bash_print(const manual *m) {
    printf("# SPDX-License-Identifier: MIT OR Unlicense\n"
           "# eval \"$(seqpar-verify --completion bash)\"\n"
           "_seqpar_verify() {\n"
           "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}\n"
           "    local verb=${COMP_WORDS[1]} words= of=\n"
           "    COMPREPLY=()\n"
           "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
           "        mapfile -t COMPREPLY < <(compgen -W \"");
    for (int i = 0; i < m->verb_count; i++) printf("%s ", m->verbs[i].name);
    for (int i = 0; i < MANUAL_WORDS; i++)
        printf("%s%s", manual_words[i].name, i + 1 < MANUAL_WORDS ? " " : "");
    printf("\" -- \"$word\")\n        return\n    fi\n");
    bash_values(m);
    bash_verbs(m);
    printf("    case \"$of\" in\n"
           "        folders) mapfile -t COMPREPLY < <(compgen -d -- \"$word\") ;;\n"
           "        files) mapfile -t COMPREPLY < <(compgen -f -- \"$word\") ;;\n"
           "    esac\n"
           "    [ -z \"$words\" ] || mapfile -t COMPREPLY < <(compgen -W \"$words\" -- "
           "\"$word\")\n"
           "    case \"$of\" in folders | files) compopt -o filenames 2>/dev/null ;; esac\n"
           "}\ncomplete -F _seqpar_verify seqpar-verify\n");
    return 0;
}

/* ---- zsh ---- */

/* Prints text escaped for '...' of _arguments or _describe. */
static inline void zsh_text(const char *text) {
    for (; *text; text++)
        if (*text == '\'')
            printf("'\\''");
        else
            printf(strchr("[]:\\", *text) ? "\\%c" : "%c", *text);
}

static inline void zsh_offer(const option *o) {
    printf(":%s:", o->kind == OPTION_NAME ? o->name : o->value);
    if (option_offers(o) == OFFER_FOLDERS) printf("_files -/");
    if (option_offers(o) == OFFER_FILES) printf("_files");
    if (option_offers(o) == OFFER_NOTHING) printf(" ");
    if (option_offers(o) != OFFER_WORDS) return;
    printf("(");
    shell_words(o->words);
    printf(")");
}

/* place: number of a positional argument, from 1. */
static inline void zsh_option(const option *o, int place) {
    printf(" \\\n            '");
    if (o->kind == OPTION_NAME) {
        printf("%d", place);
    } else {
        printf("--%s[", o->name);
        zsh_text(o->help);
        printf("]");
    }
    if (o->kind != OPTION_FLAG) zsh_offer(o);
    printf("'");
}

/* The script's last line makes it work both as an autoloaded function and with eval. */
static inline int zsh_print(const manual *m) {
    printf("#compdef seqpar-verify\n# SPDX-License-Identifier: MIT OR Unlicense\n"
           "_seqpar-verify() {\n    local -a verbs\n    verbs=(");
    for (int i = 0; i < m->verb_count; i++) {
        printf("\n        '%s:", m->verbs[i].name);
        zsh_text(m->verbs[i].help);
        printf("'");
    }
    for (int i = 0; i < MANUAL_WORDS; i++) {
        printf("\n        '%s:", manual_words[i].name);
        zsh_text(manual_words[i].help);
        printf("'");
    }
    printf(")\n    if (( CURRENT == 2 )); then _describe verb verbs; return; fi\n"
           "    local verb=$words[2]\n    shift words\n    (( CURRENT-- ))\n"
           "    case $verb in\n        --completion) _values shell ");
    shell_words(m->shells);
    printf(" ;;\n");
    for (int k = 0; k < m->verb_count; k++) {
        int place = 0;
        printf("        %s) _arguments '--help'", m->verbs[k].name);
        for (int i = 0; i < m->option_count; i++) {
            if (!option_is_of(&m->options[i], m->verbs[k].name)) continue;
            place += m->options[i].kind == OPTION_NAME;
            zsh_option(&m->options[i], place);
        }
        printf(" ;;\n");
    }
    printf("    esac\n}\n"
           "if [ \"$funcstack[1]\" = _seqpar-verify ]; then _seqpar-verify \"$@\"; "
           "else compdef _seqpar-verify seqpar-verify; fi\n");
    return 0;
}
#endif
