# SPDX-License-Identifier: MIT OR Unlicense
# awk -f verify/support/sentences.awk TABLE SOURCE...: sentences with which these sources refuse and that no row of the table has: its
# fifth column is a sentence; rows "-", the beginning of a sentence, why excuse one. Also an excuse that is none. A sentence is
# a string with a blank in a call that refuses, or, where a function passes on what it has written, in its snprintf(text, ...).
BEGIN { FS = "\t"; calls = "(seqpar_fail|usage|attention_refuse|run_option|fprintf)\\(" }
FILENAME == ARGV[1] { if (/^[#=]/ || !NF) next; if ($1 == "-") { excuse[++excuses] = $2 } else said[++sentences] = $5; next }
FNR == 1 { source(); name = FILENAME; text = "" }
{ text = text $0 "\n" }
END {
    source()
    for (i = 1; i <= excuses; i++) if (!used[i]) print "excused, but no source says so: " excuse[i]
    print formats + 0 " sentences, " excused + 0 " of them excused" >"/dev/stderr"
}
function source(    n, i, body) { # a function ends with a brace at the beginning of a line
    if (!text) return
    gsub(/\/\*([^*]|\*+[^*\/])*\*+\//, "", text)
    n = split(text, body, /\n}/)
    for (i = 1; i <= n; i++) {
        refusing(body[i], calls)
        if (body[i] ~ /(attention_refuse|run_option|usage)\(([^;"]*, )?text\)/) refusing(body[i], "snprintf\\(text,")
    }
}
function refusing(body, call,    depth, i, c, inside, run) {
    while (match(body, call)) {
        run = ""
        body = substr(body, RSTART)
        i = index(body, "(") - 1
        if (body ~ /^fprintf/ && body !~ /^fprintf\([ \n]*stderr/) { body = substr(body, 2); continue }
        for (depth = 0; i++ < length(body);) {
            c = substr(body, i, 1)
            if (c == "\"") {
                for (i++; (c = substr(body, i, 1)) != "\""; i++) {
                    if (c == "\\") { i++; if (substr(body, i, 1) == "n") continue; c = substr(body, i, 1) }
                    run = run c
                }
                continue
            }
            if (c ~ /[ \n\t]/) continue
            if (run != "") { look(run); run = "" }
            depth += (c == "(") - (c == ")")
            if (!depth) break
        }
        body = substr(body, i)
    }
}
function look(format,    i, pattern) {
    sub(/^error: /, "", format)
    if (format !~ / / || format == " ") return
    pattern = format
    gsub(/[][\\.*+?(){}|^$\/]/, "\\\\&", pattern)
    gsub(/%[-0-9.#*lz\\]*[di]/, "-?[0-9]+", pattern)
    gsub(/%[-0-9.#*lz\\]*[gef]/, "[-+0-9.einfa]+", pattern)
    gsub(/%[-0-9.#*lz\\]*s/, ".*", pattern)
    formats++
    for (i = 1; i <= excuses; i++) if (index(format, excuse[i]) == 1) break
    if (i <= excuses) { used[i] = 1; excused++ }
    if (seen(pattern) == (i <= excuses)) print name ": " (i <= excuses ? "needs no excuse: " : "") format
}
function seen(pattern,    i) {
    for (i = 1; i <= sentences; i++) if (said[i] ~ pattern) return 1
    return 0
}
