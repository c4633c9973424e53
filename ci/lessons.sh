#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# ci/lessons.sh OUT: the pages of demos/lessons with their numbers and pictures made anew, into OUT, and OUT/lessons.html, one
# page with all of them. A page is Markdown in which
#     <!-- numbers: NAME -->               is followed by a block: what build/lesson NAME prints
#     <!-- output: COMMAND -- PARTS -->    is followed by a block: the command, and what it prints. PARTS: of a verdict, its
#                                          first line and these stages; FIRST-LAST: these lines. Without: all of it
#     ![...](pictures/NAME.svg)            shows what build/lesson NAME.svg prints
cd "$(dirname "$0")/.." || exit 1
rm -rf "$1"; mkdir -p "$1/pictures" "$1/zh" "$1/work" || exit 1
out=$(cd "$1" && pwd)
export PATH=$PWD/build:$PATH LC_ALL=C

# What stands in a block.
block() { # numbers|output WHAT
    local command=$2 parts="" text
    if [ "$1" = numbers ]; then lesson "$2"; return; fi
    case $command in *" -- "*) parts=${command##* -- } command=${command% -- *} ;; esac
    text=$(cd "$out/work" && eval "$command" 2>&1; [ $? -le 1 ]) || { echo "ci/lessons.sh: '$command' says: $text" >&2; return 1; }
    echo "\$ $command"
    case $parts in
    "") echo "$text" ;;
    *-*) echo "$text" | sed -n "${parts%-*},${parts#*-}p" ;;
    *) echo "$text" | awk -v parts=" $parts " '
        NR == 1 { print; next }
        /^    [a-z]/ { shown = index(parts, " " $1 " "); if (!shown && !cut) print "    ..."; cut = !shown }
        /^$/ { exit }
        shown' ;;
    esac
}
page() { # FILE: with its blocks made anew
    local line what kind skipping=0
    while IFS= read -r line; do
        if [ $skipping = 1 ]; then [ "$line" = '```' ] && skipping=2; continue; fi
        if [ $skipping = 2 ]; then
            if [ "$line" = '```' ]; then skipping=0; fi
            continue
        fi
        printf '%s\n' "$line"
        case $line in
        "<!-- numbers: "* | "<!-- output: "*)
            what=${line#<!-- } what=${what% -->} kind=${what%%: *} what=${what#*: }
            printf '```\n%s\n```\n' "$(block "$kind" "$what" || echo FAILED)"
            skipping=1 ;;
        esac
    done <"$1"
}

failed=0
for file in demos/lessons/*.md demos/lessons/zh/*.md; do
    [ -e "$file" ] || continue
    to=$out/${file#demos/lessons/}
    rm -rf "$out/work"; mkdir "$out/work"
    page "$file" >"$to"
    grep -q '^FAILED$' "$to" && failed=1
    for picture in $(grep -oE '\(\.?\.?/?pictures/[a-z]+\.svg\)' "$to" | sed -E 's/.*pictures\///; s/\)//'); do
        case $picture in
        curves.svg | norms.svg)
            plot=loss; [ "$picture" = norms.svg ] && plot=norm
            (cd "$out/work" && mkdir -p build && 06_curves_lie >/dev/null && sed 's|^<rect width|<!-- SPDX-License-Identifier: MIT OR Unlicense -->\n&|' build/curves_$plot.svg) >"$out/pictures/$picture" || failed=1 ;;
        *) lesson "$picture" >"$out/pictures/$picture" || failed=1 ;;
        esac
    done
done
rm -rf "$out/work"
[ $failed = 0 ] || exit 1
command -v cmark-gfm >/dev/null || { echo "ci/lessons.sh: no cmark-gfm, so no lessons.html; apt-get install cmark-gfm" >&2; exit 0; }

# ---- one page of all ----
# A page's Markdown as HTML: comments go, pictures stand in the page, links between lessons are links within it.
section() { # FILE ID LANGUAGE
    printf '<section id="%s" lang="%s">\n' "$2" "$3"
    grep -v '^<!-- ' "$1" | cmark-gfm --unsafe -e table | sed -E \
        -e 's|href="(\.\./)?([0-9])_[a-z_]*\.md"|href="#lesson\2"|g' -e 's|href="README\.md"|href="#lessons"|g' -e 's|href="\.\./README\.md"|href="#lessons"|g' \
        -e 's|href="zh/([0-9])_[a-z_]*\.md"|href="#zh\1"|g' -e 's|<a href="\.\./\.\./[^"]*">([^<]*)</a>|\1|g' |
        while IFS= read -r line; do
            case $line in
            *'<img src="'*)
                file=${line#*pictures/} file=${file%%.svg*}
                printf '<figure>\n'; grep -v '^<!-- ' "$out/pictures/$file.svg" | sed -E "s/\"arrow\"/\"arrow_$2_$file\"/; s/url\(#arrow\)/url(#arrow_$2_$file)/"; printf '</figure>\n' ;;
            *) printf '%s\n' "$line" ;;
            esac
        done
    printf '</section>\n'
}
title() { grep -m 1 '^# ' "$1" | cut -c3-; }
{
    cat demos/lessons/page_head.html
    printf '<nav aria-label="Contents"><a href="#lessons">Contents</a><ol>\n'
    for file in "$out"/[0-9]_*.md; do n=$(basename "$file"); n=${n%%_*}; printf '<li><a href="#lesson%s">%s</a></li>\n' "$n" "$(title "$file" | cut -c4-)"; done
    printf '</ol><ul>\n'
    for file in "$out"/zh/[0-9]_*.md; do [ -e "$file" ] || continue; n=$(basename "$file"); n=${n%%_*}; printf '<li lang="zh"><a href="#zh%s">%s</a></li>\n' "$n" "$(title "$file")"; done
    printf '</ul></nav>\n<main>\n'
    section "$out/README.md" lessons en
    for file in "$out"/[0-9]_*.md; do n=$(basename "$file"); section "$file" "lesson${n%%_*}" en; done
    for file in "$out"/zh/[0-9]_*.md; do [ -e "$file" ] || continue; n=$(basename "$file"); section "$file" "zh${n%%_*}" zh; done
    cat demos/lessons/page_tail.html
} >"$out/lessons.html"
