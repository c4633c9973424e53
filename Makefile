# SPDX-License-Identifier: MIT OR Unlicense
# seqpar: `make demo` shows what it does, `make check` tests it. `make help` lists the rest.
CC ?= cc
ARCH ?= -march=native
OPT ?= -O3
WARN = -Wall -Wextra -Wno-format-truncation -Wno-missing-field-initializers
CFLAGS ?= -std=gnu11 $(OPT) -g $(ARCH) -fopenmp $(WARN)
CPPFLAGS += -I. -Ibuild -Idemos -Iverify
LDLIBS = -lcjson -lm -lpthread -ldl

HEADERS = seqpar.h seqpar_llama.h seqpar_safetensors.h seqpar_nccl.h
DEMOS = 01_ring 02_layouts 03_own_kernel 04_own_transport 05_attention 06_curves_lie train_sft train_dpo train_kto train_ppo train_rm make_arith compare_runs
SUITES = slow slow_loss numerics objective fold pack split comm transport nccl device attn truth bits sample memory plan schedule safetensors demos_support headers sanitize faults train post readme
BENCHES = bench_cpu bench_chunks bench_layers bench_ranks bench_sample

.PHONY: demo verify check check-all demos bench readme setup clean help
help:
	@echo "make demo    trains on 1 rank and on 4 and compares the bits (about a minute)"
	@echo "make verify  every objective on 2 to 8 ranks against one rank, and the first DPO loss (seconds)"
	@echo "make check   all tests; the last line is 'N passed, N failed'"
	@echo "make check-all  the same with the full product of ways to compute attention"
	@echo "make demos   builds the programs in demos/ into build/"
	@echo "make bench   speed of the CPU device and of ranks, checked and as ratios"
	@echo "make readme  makes the generated parts of README.md anew"
	@echo "make clean   removes build/"

demo: setup build/make_arith build/train_sft build/train_dpo build/compare_runs
	@sh demos/demo.sh

verify: setup build/verify_sp
	@build/verify_sp

check: setup
	@$(MAKE) --no-print-directory -j2 $(DEMOS:%=build/%) build/verify_sp $(filter-out build/test_headers build/test_sanitize build/test_faults build/test_train build/test_post build/test_readme,$(SUITES:%=build/test_%))
	@bash ci/run.sh $(SUITES)

check-all: export TEST_ALL = 1
check-all: check

demos: $(DEMOS:%=build/%)

bench: setup $(BENCHES:%=build/%) build/peer_blas
	@for bench in $(BENCHES); do build/$$bench || exit 1; done

readme: build/02_layouts build/test_attn build/test_plan
	@bash ci/sample.sh
	@bash ci/readme.sh > build/README.new && mv build/README.new README.md

setup:
	@sh ci/setup.sh

build/options.inc: demos/options.tsv demos/options.awk
	@mkdir -p build
	awk -f demos/options.awk demos/options.tsv > $@

build/verify_sp: verify/verify.c verify/run_objective.h $(HEADERS)
	@mkdir -p build
	$(CC) $(CPPFLAGS) $(CFLAGS) $< -o $@ $(LDLIBS)

build/test_%: verify/test_%.c $(HEADERS) verify/test.h verify/slow.h verify/slow_loss.h verify/golden.h verify/golden.tsv verify/run_model.h verify/run_objective.h verify/transport.h verify/nccl_stand_in.h $(wildcard demos/*.h) build/options.inc
	$(CC) $(CPPFLAGS) $(CFLAGS) $< -o $@ $(LDLIBS)

build/%: demos/%.c $(HEADERS) $(wildcard demos/*.h) build/options.inc
	$(CC) $(CPPFLAGS) $(CFLAGS) $< -o $@ $(LDLIBS)

build/peer_blas: bench/peer_blas.c
	@mkdir -p build
	$(CC) $(CFLAGS) $< -o $@ -ldl -lm

build/bench_%: bench/bench_%.c $(wildcard bench/*.h) $(HEADERS)
	@mkdir -p build
	$(CC) $(CPPFLAGS) $(CFLAGS) $< -o $@ $(LDLIBS)

clean:
	rm -rf build
