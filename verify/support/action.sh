# shellcheck shell=bash
# SPDX-License-Identifier: MIT OR Unlicense
# Runs a step of ci/action/action.yml as GitHub does, for suites that source this. ACTION: the file, where it is another.
ACTION=${ACTION:-$PWD/ci/action/action.yml}

action_lines() { awk -v step="$1" '/^    - name: / { here = $0 == "    - name: " step } here' "$ACTION"; } # STEP
# action_script STEP: the lines of its run
action_script() { action_lines "$1" | awk '/^      run: \|$/ { run = 1; next } /^ {0,7}[^ ]/ { run = 0 } run { print substr($0, 9) }'; }
# action_env STEP: "NAME INPUT" of each variable that has an input
action_env() { action_lines "$1" | sed -nE 's/^        ([A-Z]+): \$\{\{ inputs\.([a-z]+) \}\}$/\1 \2/p'; }
action_default() { awk -v input="  $1:" '/^  [a-z]+:$/ { here = $0 == input } here && sub(/^    default: /, "") { gsub(/"/, ""); print }' "$ACTION"; } # INPUT

# action_step STEP INPUT=VALUE...: runs it in this folder, with RUNNER_TEMP, GITHUB_PATH and GITHUB_ACTION_PATH as they are set
action_step() {
    local step=$1 name input value given words=(); shift
    while read -r name input; do
        value=$(action_default "$input")
        for given in "$@"; do if [ "${given%%=*}" = "$input" ]; then value=${given#*=}; fi; done
        words+=("$name=$value")
    done < <(action_env "$step")
    action_script "$step" >"$step.sh"
    env "${words[@]}" bash --noprofile --norc -eo pipefail "$step.sh"
}
