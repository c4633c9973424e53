#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# What stands around the sources: the steps of .github/workflows/check.yml are commands that the Makefile or the repository
# knows, and the quick ones run; the step of ci/action/action.yml that judges runs; CITATION.cff and CHANGES.md have the header's version; CONTRIBUTING.md and SECURITY.md name
# files and commands that exist; ci/format.sh does what it says. Each check also has to refuse a changed copy.
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MAKEOVERRIDES MFLAGS # SUITES=workflow of the make around this is not meant for those below
out=build/test_workflow workflow=.github/workflows/check.yml
rm -rf $out; mkdir -p $out; : >$out/known
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
expect() { if [ -z "$2" ]; then ok "$1"; else fail "$1" "$(echo "$2" | tr '\n' ' ' | cut -c1-250)"; fi; }               # NAME WHAT-IS-WRONG
refused() { if [[ $2 = *"$3"* ]]; then ok "$1"; else fail "$1" "not refused for '$3', but: ${2:-nothing is said}"; fi; } # NAME WHAT-IS-SAID TEXT

# ---- commands ----
# COMMAND: prints why it is none that the Makefile or the repository knows
refusal() {
    local words word suite
    mapfile -t words < <(printf '%s\n' "$1" | xargs -n 1 printf '%s\n' 2>/dev/null)
    case ${words[0]} in
    make) ;;
    ci/*.sh | verify/tests/*.sh) [ -x "${words[0]}" ] || echo "'$1': there is no program ${words[0]}"; return ;;
    *) echo "'$1': it is neither make nor a script of this repository"; return ;;
    esac
    for word in "${words[@]:1}"; do
        case $word in
        SUITES=*) for suite in ${word#*=}; do [ -e "verify/tests/test_$suite.sh" ] || [ -e "verify/tests/test_$suite.c" ] || echo "'$1': there is no suite $suite"; done ;;
        *=*) grep -qE "^(export )?${word%%=*} *[?:]?=" Makefile || echo "'$1': the Makefile has no variable ${word%%=*}" ;;
        esac
    done
    make --no-print-directory -n "${words[@]:1}" >$out/dry.log 2>&1 || echo "'$1': $(tail -n 1 $out/dry.log)"
}
unknown() { # the same; a dry run of all suites takes a second, so what is known is remembered
    local said
    grep -qxF -- "$1" $out/known && return
    said=$(refusal "$1")
    if [ -n "$said" ]; then echo "$said"; else echo "$1" >>$out/known; fi
}
steps() { sed -nE 's/^ *(- )?run: *//p' "$1"; } # WORKFLOW: its commands, a line each
judge() { # WORKFLOW: prints what is wrong with its steps
    [ -n "$(steps "$1")" ] || echo "it has no step"
    steps "$1" | while read -r step; do unknown "$step"; done
}
expect workflow_steps "$(judge $workflow)"
for command in demo verify check; do
    steps $workflow | grep -qx "make $command" && grep -qhE "(^|\`)make $command\b" README.md CONTRIBUTING.md && ok "workflow_runs_$command" || fail "workflow_runs_$command" "'make $command' has to be a step, and in README.md or CONTRIBUTING.md"
done
planted() { sed "$2" $workflow >$out/planted.yml; cmp -s $workflow $out/planted.yml && echo "nothing changed" || judge $out/planted.yml; } # NAME SED
refused workflow_target_refused "$(planted target 's/make demo$/make demoes/')" "No rule to make target 'demoes'"
refused workflow_suite_refused "$(planted suite 's/make check$/make check SUITES="fold pakc"/')" "no suite pakc"
refused workflow_variable_refused "$(planted variable 's/make verify$/make verify DEVISE=cpu/')" "no variable DEVISE"
refused workflow_command_refused "$(planted command 's/make verify$/build_all/')" "neither make nor a script"
refused workflow_script_refused "$(planted script 's/make verify$/ci\/runs.sh/')" "no program ci/runs.sh"
refused workflow_block_refused "$(planted block 's/make verify$/|/')" "neither make nor a script"
refused workflow_chain_refused "$(planted chain 's/make verify$/make verify; reboot/')" "No rule to make target 'verify;'"
refused workflow_empty_refused "$(planted empty '/run:/d')" "no step"

# Those that take seconds once things are built. The others are long; suites of their own do the same.
ran=0
while read -r step; do
    case $step in
    "make verify") if bash -c "$step" >$out/step.log 2>&1; then ok "workflow_ran ($step)"; else fail workflow_ran "$step: $(tail -n 1 $out/step.log)"; fi; ran=$((ran + 1)) ;;
    esac
done < <(steps $workflow)
[ $ran -gt 0 ] && ok "workflow_ran_some ($ran)" || fail workflow_ran_some "no step was run"

# ---- ci/action: its step that judges, as it stands there ----
. verify/support/action.sh
steps=$PWD/$out/action; mkdir -p $steps/bin; ln -s "$PWD/build/seqpar-verify" $steps/bin/seqpar-verify
for made in right wrong; do
    build/seqpar-verify gen --out $steps/$made --sp 4 $([ $made = wrong ] && echo --mistake over_sp) >/dev/null || fail action_gen "$made"
done
# judged CODE TEXT INPUT=VALUE...: prints what is wrong with what the step says, and with the files that are uploaded
judged() {
    local want=$1 text=$2 code name=verdict word file; shift 2
    for word in "$@"; do case $word in name=*) name=${word#*=} ;; esac; done
    rm -rf $steps/here; mkdir $steps/here
    (cd $steps/here && PATH=$steps/bin:$PATH action_step judge "$@" >said 2>&1); code=$?
    [ $code -eq "$want" ] && grep -qF -- "$text" $steps/here/said || echo "$*: exit code $code, not $want: $(head -n 1 $steps/here/said)"
    [ "$want" = 2 ] || for file in $(action_lines upload | sed -nE "s/^ +(\\$\\{\\{ inputs\\.name \\}\\}\\.[a-z]+)$/\\1/p" | sed "s/^.*}/$name/"); do
        [ -s "$steps/here/$file" ] || echo "$*: it uploads $file, which is not there"
    done
}
judge_action() {
    [ "$(action_lines upload | grep -cF '{{ inputs.name }}.')" = 2 ] || echo "it does not upload two files"
    judged 0 "right: places" dump=$steps/right/got model=$steps/right/model strict=true
    judged 0 "gradients, norm" dump=$steps/right/got want=$steps/right/want require=gradients,norm name=other
    judged 0 "parameters were NOT judged: give --want or --model" dump=$steps/right/got
    judged 1 "wrong: over_sp" dump=$steps/wrong/got model=$steps/wrong/model
    judged 4 "logits not" dump=$steps/right/got require=logits
    judged 4 "gradients not" dump=$steps/right/got strict=true
    judged 2 "strict is 'yes'; give true or false" dump=$steps/right/got strict=yes
}
expect action_judges "$(judge_action)"
for input in model want require strict name; do # an input that the step passes over is seen
    upper=${input^^}
    sed -E "s/ && words/ \&\& words/; s/^(        $upper: ).*/\1\"\"/" ci/action/action.yml >$out/action.yml
    refused action_${input}_refused "$(ACTION=$PWD/$out/action.yml judge_action)" "dump="
done
expect action_installs "$(unknown "make setup"; [ -e "ci/action/../../verify/python/pyproject.toml" ] || echo "no verify/python beside it"; action_script install | bash -n 2>&1)"

# ---- versions ----
# HEADER CHANGES CITATION: prints where they disagree. Only the newest version may be unreleased; CITATION.cff has the date of one
# that is released.
disagree() {
    local version cited head line date previous=9999-99-99
    version=$(sed -nE 's/^#define SEQPAR_VERSION +"(.*)"/\1/p' "$1")
    cited=$(sed -nE 's/^version: *"?([^"]*)"?$/\1/p' "$3")
    head=$(sed -n 's/^## //p' "$2" | head -n 1)
    [ -n "$version" ] && [ "$cited" = "$version" ] && [ "${head%% *}" = "$version" ] || echo "the header has version '$version', CHANGES.md '${head%% *}', CITATION.cff '$cited'"
    while read -r line; do
        date=${line#* - }
        if [[ $line =~ ^[0-9]+\.[0-9]+\.[0-9]+\ -\ [0-9]{4}-[0-9]{2}-[0-9]{2}$ ]] && date -d "$date" >/dev/null 2>&1; then
            [[ $date < $previous ]] || [ "$date" = "$previous" ] || echo "$line is newer than the version above it"
            previous=$date
        elif [ "$line" != "$version - unreleased" ]; then echo "CHANGES.md: '$line' is no version with its date"; fi
    done < <(sed -n 's/^## //p' "$2")
    date=${head#* - }
    [ "$date" = unreleased ] && date=""
    [ "$(sed -nE 's/^date-released: *"?([0-9-]+)"?$/\1/p' "$3")" = "$date" ] || echo "CITATION.cff: date-released has to be '$date', as CHANGES.md has it"
}
expect versions_agree "$(disagree seqpar.h CHANGES.md CITATION.cff)"
changed() { sed -E "$2" "$1" >$out/changed; cmp -s "$1" $out/changed && echo "nothing changed in $1" >&2; echo $out/changed; } # FILE SED: the name of a copy
refused versions_header_refused "$(disagree "$(changed seqpar.h 's/^(#define SEQPAR_VERSION +)".*"/\1"9.9.9"/')" CHANGES.md CITATION.cff)" "has version '9.9.9'"
refused versions_citation_refused "$(disagree seqpar.h CHANGES.md "$(changed CITATION.cff 's/^version:.*/version: 9.9.9/')")" "CITATION.cff '9.9.9'"
refused versions_changes_refused "$(disagree seqpar.h "$(changed CHANGES.md '0,/^## /s/^## [^ ]*/## 9.9.9/')" CITATION.cff)" "CHANGES.md '9.9.9'"
refused versions_undated_refused "$(disagree seqpar.h "$(changed CHANGES.md 's/^(## [0-9.]+) - .*/\1/')" CITATION.cff)" "is no version with its date"
refused versions_old_unreleased_refused "$(disagree seqpar.h "$(changed CHANGES.md '$a ## 0.0.1 - unreleased')" CITATION.cff)" "'0.0.1 - unreleased' is no"
refused versions_order_refused "$(disagree seqpar.h "$(changed CHANGES.md '$a ## 0.0.1 - 2999-01-01')" CITATION.cff)" "is newer than the version above"
refused versions_date_refused "$(disagree seqpar.h CHANGES.md "$(changed CITATION.cff '$a date-released: 2999-01-01')")" "date-released has to be"

# ---- YAML: what the host of a repository reads ----
cat >$out/read.py <<'PY'
import re, sys, yaml

def front(path):  # the YAML at the head of an issue template
    head, _, body = open(path).read().partition("---\n")[2].partition("\n---\n")
    assert body.strip(), "nothing below its head"
    return yaml.safe_load(head)

def workflow(path):
    jobs, events = (w := yaml.safe_load(open(path)))["jobs"], w[True]  # YAML 1.1 reads `on` as true
    assert {"push", "pull_request"} <= set(events), "it does not run on push and pull_request"
    for name, job in jobs.items():
        assert job["runs-on"], f"{name} has no machine"
        assert job["steps"][0].get("uses", "").startswith("actions/checkout@"), f"{name} does not begin with a checkout"
        assert all(("run" in step) != ("uses" in step) for step in job["steps"]), f"a step of {name} has not one of run and uses"
    got = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert got == sys.argv[3:], f"its steps are {got}, read here as {sys.argv[3:]}"

def action(path):
    """Its scripts are those that verify/support/action.sh reads, and each input is known and used."""
    a, text = yaml.safe_load(open(path)), open(path).read()
    steps = {step["name"]: step for step in a["runs"]["steps"]}
    assert a["runs"]["using"] == "composite" and list(steps) == ["install", "judge", "upload"], f"its steps are {list(steps)}"
    used = set(re.findall(r"\$\{\{ inputs\.(\w+) \}\}", text))
    assert used == set(a["inputs"]), f"inputs that are used or known alone: {sorted(used ^ set(a['inputs']))}"
    assert all(i.get("required") or isinstance(i.get("default"), str) for i in a["inputs"].values()), "an optional input has no default"
    got = [steps[name]["run"].strip() for name in ("install", "judge")]
    assert all(steps[name]["shell"] == "bash" for name in ("install", "judge")), "a step has no shell"
    assert got == [script.strip() for script in sys.argv[3:]], f"its scripts are {got}, read here as {sys.argv[3:]}"

def user(path):
    """The workflow of the page that uses the action gives inputs that it has."""
    a = yaml.safe_load(open("ci/action/action.yml"))
    jobs = yaml.safe_load(open(path).read().partition("```yaml\n")[2].partition("```")[0])["jobs"]
    uses = [step for job in jobs.values() for step in job["steps"] if "/ci/action" in step.get("uses", "")]
    assert len(uses) == 1, "it has no step that uses ci/action"
    given, wanted = set(uses[0]["with"]), {name for name, i in a["inputs"].items() if i.get("required")}
    assert wanted <= given <= set(a["inputs"]), f"it gives {sorted(given)}; the action has {sorted(a['inputs'])}"

def citation(path):
    c = yaml.safe_load(open(path))
    known = set("abstract authors cff-version commit contact date-released doi identifiers keywords license license-url message "
                "preferred-citation references repository repository-artifact repository-code title type url version".split())
    assert set(c) <= known, f"keys that CFF 1.2.0 does not know: {sorted(set(c) - known)}"
    assert {"authors", "cff-version", "message", "title"} <= set(c), "a key that CFF 1.2.0 wants is not there"
    assert c["cff-version"] == "1.2.0" and c["type"] == "software" and isinstance(c["version"], str)
    assert c["authors"] and all("name" in a for a in c["authors"]), "an author is no entity with a name"

def template(path):
    assert {"name", "about"} <= set(front(path)), "its head lacks name or about"

try:
    {"workflow": workflow, "citation": citation, "template": template, "action": action, "user": user}[sys.argv[1]](sys.argv[2])
except Exception as e:
    print(f"{type(e).__name__}: {e}")
PY
if python=$(ci/python_with.sh yaml); then
    read_yaml() { local commands; mapfile -t commands < <(steps "$2"); "$python" $out/read.py "$1" "$2" "${commands[@]}" 2>&1; } # KIND FILE: prints what is wrong
    expect yaml_workflow "$(read_yaml workflow $workflow)"
    read_action() { "$python" $out/read.py action "$1" "$(action_script install)" "$(action_script judge)" 2>&1; }
    expect yaml_action "$(read_action ci/action/action.yml)"
    refused yaml_action_input_refused "$(read_action "$(changed ci/action/action.yml '/^        WANT:/d')")" "['want']"
    refused yaml_action_script_refused "$(read_action "$(changed ci/action/action.yml 's/run: \|$/run: >/')")" "its scripts are"
    expect yaml_page "$(read_yaml user ci/verify-your-framework.md)"
    refused yaml_page_refused "$(read_yaml user "$(changed ci/verify-your-framework.md 's/strict: true/strickt: true/')")" "'strickt'"
    expect yaml_citation "$(read_yaml citation CITATION.cff)"
    for page in .github/ISSUE_TEMPLATE/*.md; do expect "yaml_$(basename "$page" .md)" "$(read_yaml template "$page")"; done
    refused yaml_hidden_step_refused "$(read_yaml workflow "$(changed $workflow 's/- run: make demo$/- {"run": make demo}/')")" "its steps are"
    refused yaml_event_refused "$(read_yaml workflow "$(changed $workflow '/pull_request:/d')")" "does not run on push and pull_request"
    refused yaml_checkout_refused "$(read_yaml workflow "$(changed $workflow '/checkout/d')")" "does not begin with a checkout"
    refused yaml_broken_refused "$(read_yaml citation "$(changed CITATION.cff 's/^authors:/authors: [/')")" "Error"
    refused yaml_key_refused "$(read_yaml citation "$(changed CITATION.cff 's/^keywords:/words:/')")" "['words']"
    refused yaml_template_refused "$(read_yaml template "$(changed .github/ISSUE_TEMPLATE/defect.md '/^about:/d')")" "lacks name or about"
else for name in workflow action page citation template; do skip yaml_$name "no python3 with yaml"; done; fi

# ---- pages: their files and commands are there, and a terminal of 60 columns shows them ----
missing() { # PAGE: prints what it names that is not there
    { grep -oE '\]\([^)#:]+\)' "$1" | sed 's/^](//; s/)$//'; grep -oE '`(demos|verify|ci|bench)/[A-Za-z0-9_./]+`' "$1" | tr -d '`' | grep -v NAME; } | while read -r file; do [ -e "$file" ] || echo "$1: there is no $file"; done
    { grep -E '^make ' "$1" | sed 's/ *#.*//'; grep -oE '`make [^`]+`' "$1" | tr -d '`'; } | sort -u | while read -r command; do unknown "$command"; done
    awk -v page="$1" 'length > 60 { print page ": line " NR " has " length " columns, more than 60" }' "$1"
}
for page in CONTRIBUTING.md SECURITY.md; do expect "page_$page" "$(missing $page)"; done
[ "$(wc -l <CONTRIBUTING.md)" -le 90 ] && ok page_is_short || fail page_is_short "CONTRIBUTING.md has $(wc -l <CONTRIBUTING.md) lines, more than 90"
refused page_file_refused "$(missing "$(changed CONTRIBUTING.md 's/`verify\/faults.tsv`/`verify\/fault.tsv`/')")" "there is no verify/fault.tsv"
refused page_command_refused "$(missing "$(changed CONTRIBUTING.md 's/^make planted/make plant/')")" "No rule to make target 'plant'"
refused page_width_refused "$(missing "$(changed SECURITY.md '/^Only the/s/$/ It is the one that has the highest number./')")" "more than 60"

# ---- ci/format.sh, in a tree of its own ----
mkdir -p $out/tree/ci; cp ci/format.sh $out/tree/ci; cp .clang-format $out/tree
printf 'int one(void) { return 1; }\n' >$out/tree/good.c
printf 'int  two( void )\n{\n  return 2;\n}\n' >$out/tree/bad.c
in_tree() { GIT_CEILING_DIRECTORIES=$PWD/$out $out/tree/ci/format.sh "$@" 2>&1; }
in_tree --chek >$out/format.log; [ $? -eq 2 ] && grep -q "'--chek' is not known" $out/format.log && ok format_usage || fail format_usage "$(head -n 1 $out/format.log)"
mkdir -p $out/none; for tool in bash sed dirname; do ln -sf "$(command -v $tool)" $out/none/$tool; done
said=$(PATH=$PWD/$out/none in_tree --check); [ $? -eq 0 ] && [[ $said = "skip format: clang-format 14 is wanted, none"* ]] && ok format_without || fail format_without "$said"
said=$(in_tree --check); code=$?
if [[ $said = "skip format: "* ]]; then skip format "${said#skip format: }"
else
    [ $code -eq 1 ] && [ "$(basename "$said")" = bad.c ] && ok format_check || fail format_check "exit code $code: $said"
    in_tree >$out/format.log && [ "$(cat $out/tree/bad.c)" = "int two(void) { return 2; }" ] && [ -z "$(in_tree --check)" ] && ok format_formats || fail format_formats "$(head -n 3 $out/tree/bad.c | tr '\n' ' ')"
fi

if [ -n "$TEST_ALL" ]; then # 15 s of processor
    said=$(ci/format.sh --check); code=$?
    if [[ $said = "skip format: "* ]]; then skip format_tree "${said#skip format: }"
    elif [ $code -eq 0 ]; then ok format_tree; else fail format_tree "run ci/format.sh: $(echo "$said" | head -n 3 | tr '\n' ' ')"; fi
fi

printf '%d passed, %d failed' $passed $failed; [ $skipped -gt 0 ] && printf ', %d skipped' $skipped; echo
[ $failed -eq 0 ]
