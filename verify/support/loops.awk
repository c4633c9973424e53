# SPDX-License-Identifier: MIT OR Unlicense
# awk -v list=TABLE -f verify/support/loops.awk seqpar.h: the header with a counter in every loop, for a build that is asked which loops
# came to a second turn within one entry; TABLE gets a line for each: file, number, line, function, head of the loop. Counters
# of arcs (gcov) cannot tell: two entries of one turn each have the same sums as one of two and one of none.
#
#     for (A; B; C)   becomes   for (one entry) for (A; TURN(7, (B)); C)
#
# with a number of its own that counts the turns of this entry. A program adds a line for each loop that ran to the file
# $SEQPAR_LOOPS when it ends: file, number, and 1 if no entry had a second turn, 2 if one had. A loop whose head OpenMP
# must understand has no counter.
function at(i) { return substr(text, i, 1) }
# the place behind a comment, a string or a character that begins at i; i where there is none
function behind(i,    c, end) {
    c = at(i)
    if (c == "/" && at(i + 1) == "*") { end = index(substr(text, i + 2), "*/"); return end ? i + end + 3 : length(text) + 1 }
    if (c == "/" && at(i + 1) == "/") { end = index(substr(text, i), "\n"); return i + end - 1 }
    if (c != "\"" && c != "'") return i
    for (i++; at(i) != c; i++) if (at(i) == "\\") i++
    return i + 1
}
# the place of the bracket that closes the one at i; semicolons on the way, which no bracket encloses, are semi[1], semi[2]
function closing(i,    depth, next_i, c) {
    semis = 0
    for (; i <= length(text); i++) {
        while ((next_i = behind(i)) != i) i = next_i
        c = at(i)
        if (c == "(") depth++
        else if (c == ")" && --depth == 0) return i
        else if (c == ";" && depth == 1) semi[++semis] = i
    }
    print file ": a bracket that nothing closes" >"/dev/stderr"
    exit 1
}
function plain(s) { gsub(/\\\n/, " ", s); gsub(/[ \t\n]+/, " ", s); return s }
function lines_to(i) { while (seen < i) if (at(++seen) == "\n") line++; return line }
function counted(what, begin, end) { # a loop whose head is text[begin .. end]: its number
    printf "%s\t%d\t%d\t%s\t%s\n", file, ++count, lines_to(begin), name, plain(substr(text, begin, end - begin + 1)) >list
    return count
}
{ file = FILENAME; text = text $0 "\n" }
END {
    sub(/.*\//, "", file)
    table = file; gsub(/[^a-z]/, "_", table)
    entry = "for (unsigned seqpar__stages = 0, seqpar__entry = 1; seqpar__entry; seqpar__entry = 0) "
    line = from = 1; seen = 0
    for (i = 1; i <= length(text); i++) {
        while ((j = behind(i)) != i) i = j
        c = at(i)
        if (at(i - 1) == "\n" && c ~ /[A-Za-z#]/ && match(substr(text, i, 200), /^[^\n;={]*[A-Za-z0-9_#]+\(/)) {
            name = substr(text, i, RLENGTH - 1); sub(/.*[^A-Za-z0-9_#]/, "", name)
        }
        if ((c != "f" && c != "w") || at(i - 1) ~ /[A-Za-z0-9_]/ || !match(substr(text, i, 7), /^(for|while) \(/)) continue
        open = i + RLENGTH - 1
        end = closing(open)
        head = substr(text, open, end - open + 1)
        if (c == "w" && substr(text, i - 2, 2) == "} ") { # behind do: its truth is a second turn
            if (head != "(0)") { out = out substr(text, from, open - from) "(SEQPAR__AGAIN_" table "(" counted("do", i, end) ", " head "))"; from = end + 1 }
        } else if (c == "w") {
            out = out substr(text, from, i - from) entry "while (SEQPAR__TURN_" table "(" counted("while", i, end) ", " head "))"; from = end + 1
        } else if (substr(text, i - 120, 120) !~ /pragma omp parallel for[^\n]*\n *$/) {
            test = substr(text, semi[1] + 1, semi[2] - semi[1] - 1)
            if (test ~ /^[ \t\n\\]*$/) test = "1"
            out = out substr(text, from, i - from) entry substr(text, i, semi[1] - i + 1) " SEQPAR__TURN_" table "(" counted("for", i, end) ", (" test "))"; from = semi[2]
        }
        i = open
    }
    close(list)
    print "#ifndef SEQPAR__LOOPS_" table
    print "#define SEQPAR__LOOPS_" table
    print "#include <stdio.h>\n#include <stdlib.h>"
    print "static unsigned char seqpar__loops_" table "[2][" count + 1 "]; /* had a turn, had a second */"
    print "__attribute__((destructor, unused)) static void seqpar__loops_end_" table "(void) {"
    print "    const char *path = getenv(\"SEQPAR_LOOPS\");"
    print "    FILE *to = path ? fopen(path, \"a\") : NULL;"
    print "    for (int i = 1; to && i <= " count "; i++)"
    print "        if (seqpar__loops_" table "[0][i]) fprintf(to, \"" file "\\t%d\\t%d\\n\", i, 1 + seqpar__loops_" table "[1][i]);"
    print "    if (to) fclose(to);\n}"
    print "#define SEQPAR__TURN_" table "(n, test) ((test) && (seqpar__loops_" table "[++seqpar__stages > 1][n] = 1))"
    print "#define SEQPAR__AGAIN_" table "(n, test) ((seqpar__loops_" table "[0][n] = 1) && (test) && (seqpar__loops_" table "[1][n] = 1))"
    print "#endif"
    print "#line 1 \"" file "\""
    printf "%s%s", out, substr(text, from)
}
