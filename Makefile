# SPDX-License-Identifier: MIT OR Unlicense
# seqpar: `make demo` shows what it does, `make check` tests it. `make help` lists the rest.
CC ?= cc
ARCH ?= -march=native
OPT ?= -O3
WARN = -Wall -Wextra -Wno-format-truncation -Wno-missing-field-initializers
CFLAGS ?= -std=gnu11 $(OPT) -g $(ARCH) -fopenmp $(WARN)
CPPFLAGS += -I. -Ibuild -Idemos -Iverify
LDLIBS = -lcjson -lz -lm -lpthread -ldl

HEADERS = seqpar.h seqpar_llama.h seqpar_safetensors.h seqpar_nccl.h seqpar_mpi.h
TRAINER_HEADERS = $(wildcard demos/*.h demos/trainer/*/*.h)
ORACLE_HEADERS = $(wildcard verify/oracle/*/*.h)
VERIFY_HEADERS = $(wildcard verify/*.h verify/support/*.h verify/second/*.h verify/stand_in/*.h verify/tests/*.h)
ORACLE = build/seqpar-verify
DEMOS = 00_by_hand 01_ring 02_layouts 03_own_kernel 04_own_transport 05_attention 06_curves_lie 07_own_attention 08_own_trainer 10_loss_and_optimizer snippet picture train_sft train_dpo train_kto train_kd train_prm train_ppo train_rm generate seqpar make_arith compare_runs
# One suite a stage or subject of the oracle.
DUMPS = $(patsubst verify/tests/test_%.c,%,$(sort $(wildcard verify/tests/test_dump*.c)))
# One suite a group of operations of the device table.
DEVICES = $(patsubst verify/tests/test_%.c,%,$(sort $(wildcard verify/tests/test_device*.c)))
SUITES = lessons absence refusals refused cuda gpu_script headers headers_transports compiled install faults sanitize sanitize_nccl attn memory injected truth bits objective definitions definition_runs evaluation options absolute inputs program yaml pages train post lora kd prm generate ppo bad_input runs certificate kills processes sizes fuzz parsers smallest scarce reward readme snippet bench oracle oracle_reports oracle_manual oracle_bar oracle_refused oracle_scarce gallery $(DUMPS) references python pip wheel nccl nccl_parts plan transport sample sampled adapters distill $(DEVICES) numerics slow slow_loss slow_loss_slopes slow_loss_identities pack fold split agree comm null optim nccl_gpus train_nccl schedule safetensors token_file option_parser data_documents data_files data_pairs arith plot_progress rollout dry_run logs sanitize_trainers mpi hosts workflow setup bare
# The same in parts, for those who work on one: the core is the rest.
ON_DEVICES = cuda gpu_script headers_transports sanitize_nccl nccl nccl_parts nccl_gpus train_nccl transport mpi hosts processes
OF_ORACLE = lessons compiled workflow oracle oracle_reports oracle_manual oracle_bar oracle_refused oracle_scarce gallery $(DUMPS) references python pip wheel parsers fuzz
OF_TRAINERS = readme memory smallest definitions definition_runs evaluation options absolute inputs program yaml pages train post lora kd prm generate ppo bad_input refused runs certificate kills sizes reward token_file option_parser data_documents data_files data_pairs arith plot_progress rollout dry_run logs sanitize_trainers
OF_CORE = $(filter-out $(ON_DEVICES) $(OF_ORACLE) $(OF_TRAINERS),$(SUITES))
PYTHON ?= python3
BENCHES = bench_cpu bench_chunks bench_layers bench_ranks bench_sample bench_step bench_vocab

.PHONY: check-core check-devices check-oracle check-trainers parts lessons suites mutants certificate uninstall install wheel shared frameworks scores vectors linked-flags cudnn-folder cudnn quick demo verify check check-all check-gpu gpu-bundle cuda mpi demos bench bench-gpu readme setup clean help
help:
	@echo "make demo    trains on 1 rank and on 4 and compares the bits (a minute, and one to build)"
	@echo "make verify  every objective on 2 to 8 ranks against one rank, and the first DPO loss (seconds, once built); DEVICE=cuda: on a GPU"
	@echo "make check   all tests (SUITES=\"fold pack\": some); the last line is 'N passed, N failed'"
	@echo "make lessons  nine lessons on sequence parallelism as one page, build/lessons.html (demos/lessons)"
	@echo "make check-core, check-devices, check-oracle, check-trainers  a part of it each"
	@echo "make quick   what one types while editing (half a minute, once built)"
	@echo "make check-all  the same with everything in full: ways to compute attention, nvcc targets, compilers"
	@echo "make mutants  draws mistakes and says which of them no suite sees (SEED=7 COUNT=50: an hour or more)"
	@echo "make certificate  230 runs of 20 steps, one hash for each objective whoever computes (ten minutes)"
	@echo "make demos   builds the programs in demos/ into build/; with CC=nvcc as CUDA C++ into build/nvcc/"
	@echo "make cuda    builds the trainers with the CUDA device into build/cuda_train_* (nvcc)"
	@echo "make mpi     builds the trainers for mpirun and srun into build/mpi_train_* (mpicc)"
	@echo "make cudnn   builds the demo with NVIDIA cuDNN's attention (nvcc; CUDNN=folder, or pip's nvidia-cudnn-cu13)"
	@echo "make check-gpu  the device suites and make verify on a GPU"
	@echo "make bench   speed of the CPU device and of ranks, checked and as ratios"
	@echo "make bench-gpu  speed of the CUDA device beside PyTorch's on the same GPU"
	@echo "make gpu-bundle  all that ci/gpu.sh needs on a machine with a GPU, in build/gpu (nvcc; minutes)"
	@echo "make readme  makes the generated parts of the pages anew"
	@echo "make vectors golden vectors of whole steps in build/vectors, for checks without a binary"
	@echo "make scores      what comparisons of published tests see of known mistakes: verify/pages/TESTS.md (minutes)"
	@echo "make frameworks  what seqpar-verify says of other people's code (PYTHON=one that has it; the rest is skipped)"
	@echo "make shared  the library for other languages, build/libseqpar.so (demos/ring.py calls it)"
	@echo "make install  headers, that library, pkg-config's and CMake's files to PREFIX (/usr/local; DESTDIR; ARCH= for any machine of this kind)"
	@echo "make wheel   seqpar-verify as wheels for x86-64 and ARM, for glibc from 2.17 on, and their SHA-256, in dist/ (minutes; the network)"
	@echo "make clean   removes build/ and dist/"
	@echo "SETUP=print make demo  only says what would be installed for it"

# Suites that run the demos, which are built before them.
RUN_DEMOS = definition_runs evaluation yaml pages refused python train logs runs certificate kills processes mpi hosts post lora kd prm generate bad_input sizes fuzz reward ppo readme inputs program
# What the targets need that were asked for.
ASKED = $(MAKECMDGOALS) $(if $(filter check check-all,$(MAKECMDGOALS)),$(SUITES:%=test_%) $(if $(filter $(RUN_DEMOS),$(SUITES)),demos))
setup:
	@sh ci/setup.sh $(ASKED)

# SETUP=print make demo: what would be installed, and no more.
ifeq ($(SETUP),print)
$(filter-out setup help,$(MAKECMDGOALS)): setup ;
.PHONY: $(MAKECMDGOALS)
else

demo: setup build/make_arith build/train_sft build/train_dpo build/compare_runs
	@sh demos/demo.sh

DEVICE = cpu
VERIFY = $(if $(filter cuda,$(DEVICE)),$(BUNDLE)/verify,build/verify_sp)
verify: setup $(VERIFY)
	@$(VERIFY) --device $(DEVICE)

# What two suites need is built before them, since they run beside each other.
# make check SUITES="fold pack" runs some. Suites in C are programs; most shell suites run the demos.
IN_C = $(patsubst verify/tests/test_%.c,%,$(wildcard $(SUITES:%=verify/tests/test_%.c)))
check: setup
	@sh ci/words.sh $(SUITES)
	@$(MAKE) --no-print-directory -j2 $(IN_C:%=build/test_%) $(if $(filter $(RUN_DEMOS),$(SUITES)),$(DEMOS:%=build/%) build/verify_sp build/reward_server_for_tests) $(if $(filter readme,$(SUITES)),build/test_attn build/test_plan) $(if $(filter snippet,$(SUITES)),build/10_loss_and_optimizer) $(if $(filter readme inputs oracle oracle_reports oracle_manual oracle_bar oracle_refused oracle_scarce python pip wheel fuzz parsers smallest,$(SUITES)),$(ORACLE) build/verify_sp) $(if $(filter workflow,$(SUITES)),$(ORACLE) build/verify_sp) $(if $(filter lessons,$(SUITES)),$(LESSON_NEEDS)) $(if $(filter bench faults cuda,$(SUITES)),planted build/faults/seqpar.o)
	@bash ci/run.sh $(SUITES)

# Mistakes drawn by a seed, and whether the suites see them: verify/mutants/run.py. Hours; not a part of check.
SEED = 7
COUNT = 50
MUTANTS =
PARTS =
mutants:
	@SEED=$(SEED) COUNT=$(COUNT) PARTS="$(PARTS)" MUTANTS="$(MUTANTS)" $(PYTHON) verify/mutants/run.py

# While editing: half a minute. The library with -O1, the suites that find most, every objective on 2 to 8 ranks.
QUICK = pack split comm agree schedule bits
quick: setup
	@$(MAKE) --no-print-directory -j2 $(QUICK:%=build/quick/test_%) build/quick/verify
	@for suite in $(QUICK); do TEST_WAYS=23 TEST_FIRST=1 build/quick/test_$$suite >build/quick/$$suite.log || { tail -n 3 build/quick/$$suite.log; exit 1; }; echo "$$suite: $$(tail -n 1 build/quick/$$suite.log)"; done
	@build/quick/verify >build/quick/verify.log || { cat build/quick/verify.log; exit 1; }; tail -n 3 build/quick/verify.log
QUICKLY = @mkdir -p build/quick; $(CC) $(CPPFLAGS) $(CFLAGS) -O1 $(LINKED) $< build/counting.o -o $@ $(LDLIBS)
build/quick/test_%: verify/tests/test_%.c build/counting.o $(VERIFY_HEADERS)
	$(QUICKLY)
build/quick/verify: verify/verify.c build/counting.o $(VERIFY_HEADERS)
	$(QUICKLY)

check-all: export TEST_ALL = 1
check-all: check

check-core: suites_of = $(OF_CORE)
check-devices: suites_of = $(ON_DEVICES)
check-oracle: suites_of = $(OF_ORACLE)
check-trainers: suites_of = $(OF_TRAINERS)
check-core check-devices check-oracle check-trainers:
	@$(MAKE) --no-print-directory check SUITES="$(suites_of)"

# nvcc builds them as CUDA C++ from the same sources, in a folder of their own.
ifneq ($(findstring nvcc,$(notdir $(CC))),)
demos: $(DEMOS:%=build/nvcc/%)
else
demos: $(DEMOS:%=build/%)
endif

# BENCH_RESULTS=1 writes a page into bench/results; BENCH_MODEL=folder BENCH_TEXT=file: a model beside transformers, too.
bench: setup $(BENCHES:%=build/%) build/peer_blas $(if $(BENCH_MODEL),build/steps)
	@for bench in $(BENCHES); do build/$$bench || exit 1; done
	@$(if $(BENCH_MODEL),$(PYTHON) bench/bench_transformers.py $(BENCH_MODEL) $(BENCH_TEXT) --json build/bench/transformers.json)
	@$(if $(BENCH_RESULTS),$(PYTHON) bench/page.py bench/results)

readme: build/02_layouts build/test_attn build/test_plan build/picture build/test_definitions $(ORACLE)
	@bash ci/sample.sh
	@build/picture > demos/picture.svg
	@build/test_definitions --page > verify/pages/DEFINITIONS.md
	@$(ORACLE) list --markdown > verify/pages/MISTAKES.md
	@$(ORACLE) list --gallery --markdown > verify/pages/GALLERY.md
	@$(PYTHON) -B verify/frameworks/comparisons.py --page > build/TESTS.md && mv build/TESTS.md verify/pages/TESTS.md
	@for page in README.md demos/README.md verify/pages/design.md; do bash ci/readme.sh $$page > build/README.new && mv build/README.new $$page || exit 1; done

# The pages of demos/lessons with their numbers and pictures made anew, and all of them as one page.
LESSON_NEEDS = build/lesson build/06_curves_lie $(ORACLE)
lessons: setup $(LESSON_NEEDS)
	@bash ci/lessons.sh build/lessons
	@cp -r build/lessons/*.md build/lessons/pictures build/lessons/zh demos/lessons/
	@if [ -e build/lessons/lessons.html ]; then mv build/lessons/lessons.html build/lessons.html && echo build/lessons.html; fi

# One hash for each objective, whoever computes; where there is an mpicc, processes too.
certificate: demos $(if $(shell command -v mpicc),mpi)
	@bash ci/certificate.sh

# Cases with answers, for those who want no binary.
vectors: $(ORACLE)
	@bash ci/vectors.sh

# Each adapter's head names what it needs of PyPI. None of it is needed for anything else.
frameworks: $(ORACLE)
	@SEQPAR_VERIFY=$(CURDIR)/$(ORACLE) $(PYTHON) verify/frameworks/run.py --markdown build/frameworks.md

# What comparisons of published tests see of the oracle's mistakes: the table, and the page of it.
scores: $(ORACLE)
	@$(PYTHON) -B verify/frameworks/comparisons.py --table $(CURDIR)/$(ORACLE) > build/comparisons.tsv
	@mv build/comparisons.tsv verify/frameworks/comparisons.tsv
	@$(PYTHON) -B verify/frameworks/comparisons.py --page > verify/pages/TESTS.md

build/options.inc: demos/trainer/run/options.tsv demos/trainer/run/options.awk
	@mkdir -p build
	awk -f demos/trainer/run/options.awk demos/trainer/run/options.tsv > $@

# The implementation is compiled once. What needs the public API alone is linked with it: its own units see prototypes,
# whatever *_IMPLEMENTATION they define.
build/seqpar.o: verify/library.c verify/seqpar_check.h $(HEADERS)
	@SETUP=check sh ci/setup.sh
	@mkdir -p build
	$(CC) $(CPPFLAGS) $(CFLAGS) -c $< -o $@
LINKED = -DSEQPAR__IMPLEMENTED -DSEQPAR__LLAMA_IMPLEMENTED -DSEQPAR__CHECK_IMPLEMENTED -DSEQPAR__SAFETENSORS_IMPLEMENTED

suites: # for scripts
	@echo $(SUITES)
parts: # the suites of each part, for scripts
	@printf '%s\n' "core $(OF_CORE)" "devices $(ON_DEVICES)" "oracle $(OF_ORACLE)" "trainers $(OF_TRAINERS)"

linked-flags: # for scripts that compile suites in other ways
	@echo $(LINKED)

SELF_TEST_HEADERS = demos/trainer/base/files.h demos/trainer/ppo/advantage.h verify/support/run_objective.h verify/support/layouts.h verify/support/kept.h
build/verify_sp: verify/verify.c build/seqpar.o $(SELF_TEST_HEADERS)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(LINKED) $< build/seqpar.o -o $@ $(LDLIBS)

$(DUMPS:%=build/test_%) build/test_gallery: $(ORACLE)
build/test_references build/test_gallery: $(ORACLE_HEADERS)
build/test_gallery: CPPFLAGS += -D_GNU_SOURCE
OF_ORACLE_HEADERS = $(ORACLE_HEADERS) verify/second/slow.h verify/support/kept.h demos/trainer/model/model_folder.h demos/trainer/model/peft.h demos/trainer/log/progress.h
# sqrt without errno is one instruction, for several numbers at once; its values are the same.
FAST_ROOTS = -fno-math-errno
# Put in its place whole: a suite may be running the one before.
$(ORACLE): verify/seqpar_verify.c build/seqpar.o build/self_test.o $(OF_ORACLE_HEADERS)
	$(CC) -D_GNU_SOURCE $(CPPFLAGS) $(CFLAGS) $(FAST_ROOTS) $(LINKED) $< build/seqpar.o build/self_test.o -o $@.$$$$ $(LDLIBS) && mv $@.$$$$ $@
# `seqpar-verify test` is make verify
build/self_test.o: verify/verify.c build/seqpar.o $(SELF_TEST_HEADERS)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(LINKED) -Dmain=seqpar_verify_test -c $< -o $@

# Copies of the headers, and of what the trainers compute, with every mistake of verify/faults.tsv in them, each behind a switch.
TRAINER_FAULTS = $(patsubst %,build/faults/%,$(TRAINER_HEADERS))
.PHONY: planted
planted: $(HEADERS:%=build/faults/%) $(TRAINER_FAULTS) build/faults/seqpar_cuda.cu
build/faults/%: % verify/faults.tsv verify/support/plant.awk
	@mkdir -p $(@D)
	awk -v file=$< -f verify/support/plant.awk verify/faults.tsv $< >$@.new && mv $@.new $@
build/faults/seqpar.o: verify/library.c verify/seqpar_check.h $(HEADERS:%=build/faults/%)
	$(CC) -Ibuild/faults $(CPPFLAGS) $(CFLAGS) -O2 -w -DSEQPAR_COUNT_WORK -c $< -o $@
build/faults/cuda_on_cpu.o: build/faults/seqpar_cuda.cu build/faults/seqpar.h verify/stand_in/cuda_on_cpu.h verify/stand_in/cuda_on_cpu_bridge.h verify/stand_in/cublas_on_cpu.h
	$(ON_CPU) -c $< -o $@

TEST_HEADERS = $(VERIFY_HEADERS) $(TRAINER_HEADERS) verify/second/golden.tsv verify/second/golden_definitions.tsv build/options.inc
build/test_%: verify/tests/test_%.c build/seqpar.o $(TEST_HEADERS)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(LINKED) $< build/seqpar.o -o $@ $(LDLIBS)

# These bound the steps of packing and splitting by counting them.
COUNTING = pack rollout split
build/counting.o: verify/library.c verify/seqpar_check.h $(HEADERS)
	@mkdir -p build
	$(CC) $(CPPFLAGS) $(CFLAGS) -O1 -DSEQPAR_COUNT_WORK -c $< -o $@
$(COUNTING:%=build/test_%): build/test_%: verify/tests/test_%.c build/counting.o $(TEST_HEADERS)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(LINKED) $< build/counting.o -o $@ $(LDLIBS)

# These look inside or count memory: they hold the implementation themselves.
# Suites that measure nothing and compare no bits with other builds are compiled quickly (the library they link is not: private).
QUICKLY_BUILT = device fold memory injected plan safetensors scarce option_parser data_documents data_files data_pairs arith plot_progress
$(QUICKLY_BUILT:%=build/test_%): private OPT = -O1
INSIDE = attn device numerics fold memory injected plan safetensors scarce
$(INSIDE:%=build/test_%): build/test_%: verify/tests/test_%.c $(HEADERS) $(TEST_HEADERS)
	@mkdir -p build
	$(CC) $(CPPFLAGS) $(CFLAGS) $< -o $@ $(LDLIBS)

build/reward_server_for_tests: verify/support/reward_server_for_tests.c
	@mkdir -p build
	$(CC) -D_GNU_SOURCE $(CPPFLAGS) $(CFLAGS) $< -o $@ $(LDLIBS)

build/train_ppo build/generate build/test_rollout build/test_options build/test_memory build/test_absolute: LDLIBS += -lcurl

build/seqpar build/nvcc/seqpar: LDLIBS += -lyaml
build/seqpar: $(wildcard demos/program/*.h)
build/%: demos/%.c build/seqpar.o $(TRAINER_HEADERS) verify/seqpar_check.h build/options.inc
	$(CC) $(CPPFLAGS) $(CFLAGS) $(LINKED) $< build/seqpar.o -o $@ $(LDLIBS)

build/lesson: demos/lessons/lesson.c $(wildcard demos/lessons/*.h) seqpar.h demos/trainer/base/files.h
	@mkdir -p build
	$(CC) $(CPPFLAGS) $(CFLAGS) -O1 $< -o $@ -lm -lpthread

# The one that has nothing of the library.
build/00_by_hand: demos/00_by_hand.c
	@mkdir -p build
	$(CC) $(CFLAGS) $< -o $@ -lm

build/peer_blas: bench/peer_blas.c
	@mkdir -p build
	$(CC) $(CFLAGS) $< -o $@ -ldl -lm

build/bench_%: bench/bench_%.c build/seqpar.o $(wildcard bench/*.h)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(LINKED) $< build/seqpar.o -o $@ $(LDLIBS)

# What bench_transformers.py asks.
build/steps: bench/steps.c build/seqpar.o $(TRAINER_HEADERS)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(LINKED) -Wno-unused-function $< build/seqpar.o -o $@ $(LDLIBS)

# Its bounds are those of the library's own vectors.
build/bench_layers: bench/bench_layers.c bench/bench.h $(HEADERS)
	@mkdir -p build
	$(CC) $(CPPFLAGS) $(CFLAGS) $< -o $@ $(LDLIBS)

# ---- CUDA: the device on a GPU, and its kernels thread by thread on the CPU (verify/stand_in/cuda_on_cpu.h) ----
NVCC ?= nvcc
CUDA_ARCH ?= -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=sm_90a
CUDA = $(dir $(shell command -v $(NVCC)))..
CUDA_LIBS = -L$(CUDA)/lib64 -lcublas -lcudart -lstdc++
ON_CPU_OPT = -O2 -g
ON_CPU = $(CXX) -std=c++17 $(ON_CPU_OPT) $(ARCH) -Wall -Wextra -Wno-unused-function -I. -x c++ -DSEQPAR_CUBLAS -include verify/stand_in/cublas_on_cpu.h
TRAINERS = train_sft train_dpo train_kto train_kd train_prm train_rm train_ppo generate

build/cuda.o: seqpar_cuda.cu seqpar.h
	@mkdir -p build
	$(NVCC) -std=c++17 -O3 -fmad=false -Xptxas -v -DSEQPAR_CUBLAS -I. $(CUDA_ARCH) -c $< -o $@ > build/cuda.log 2>&1 || { cat build/cuda.log; exit 1; }

build/cuda_on_cpu.o: seqpar_cuda.cu seqpar.h verify/stand_in/cuda_on_cpu.h verify/stand_in/cuda_on_cpu_bridge.h verify/stand_in/cublas_on_cpu.h
	@mkdir -p build
	$(ON_CPU) -c $< -o $@

build/on_cpu_test_queue_nccl: verify/tests/test_queue.c verify/stand_in/nccl_stand_in.h verify/stand_in/nccl_on_cpu.h verify/stand_in/nccl_world.h
build/on_cpu_test_train_nccl: verify/stand_in/nccl_stand_in.h verify/stand_in/nccl_on_cpu.h $(TRAINER_HEADERS) build/options.inc
LINK_ON_CPU = $(CC) $(CPPFLAGS) $(CFLAGS) $(LINKED) -DTEST_CUDA $< build/seqpar.o build/cuda_on_cpu.o -o $@ $(LDLIBS) -lstdc++
build/on_cpu_test_%: verify/tests/test_%.c build/cuda_on_cpu.o build/seqpar.o $(VERIFY_HEADERS)
	$(LINK_ON_CPU)
build/on_cpu_verify: verify/verify.c build/cuda_on_cpu.o build/seqpar.o $(VERIFY_HEADERS)
	$(LINK_ON_CPU)

build/on_cpu_bench_gpu: bench/bench_gpu.c bench/gpu.h bench/bench.h build/cuda_on_cpu.o build/seqpar.o
	$(CC) $(CPPFLAGS) $(CFLAGS) $(LINKED) $< build/seqpar.o build/cuda_on_cpu.o -o $@ $(LDLIBS) -lstdc++

# Where nccl.h and libnccl.so are, a trainer's ranks can be processes.
NCCL_FLAGS = -isystem $(CUDA)/include -L$(CUDA)/lib64
NCCL = $(shell echo 'int main(void) { return 0; }' | $(CC) -include nccl.h $(NCCL_FLAGS) -x c - -lnccl -o /dev/null 2>/dev/null && echo -DDEMO_NCCL $(NCCL_FLAGS) -lnccl)

# The same upon the stand-in for NCCL, on a machine without GPUs.
build/test_nccl_gpus: CPPFLAGS += -include verify/stand_in/nccl_stand_in.h

build/cuda_%: demos/%.c build/cuda.o $(HEADERS) $(TRAINER_HEADERS) build/options.inc
	$(CC) $(CPPFLAGS) $(CFLAGS) -DDEMO_CUDA $< build/cuda.o -o $@ $(NCCL) $(LDLIBS) -lcurl $(CUDA_LIBS)

# Ranks that mpirun starts, with Open MPI, MPICH or what is built of them (MPICC=mpicc.mpich).
MPICC ?= mpicc
build/mpi_%: demos/%.c build/seqpar.o $(HEADERS) $(TRAINER_HEADERS) build/options.inc
	$(MPICC) $(CPPFLAGS) $(CFLAGS) $(LINKED) -DDEMO_MPI $< build/seqpar.o -o $@ $(LDLIBS) -lcurl

mpi: setup
	@command -v $(MPICC) >/dev/null || { echo "make mpi: no $(MPICC); apt-get install libopenmpi-dev openmpi-bin, or MPICC=the compiler of your MPI"; exit 1; }
	@$(MAKE) --no-print-directory $(TRAINERS:%=build/mpi_%)

comma := ,
space := $(subst ,, )
NVCC_DEMO_ARCH ?= -arch=sm_90a
NVCC_HOST = $(subst $(space),$(comma),$(strip $(OPT) $(ARCH) -fopenmp))

build/nvcc/train_ppo build/nvcc/generate: LDLIBS += -lcurl
build/nvcc/%: demos/%.c $(HEADERS) verify/seqpar_check.h $(TRAINER_HEADERS) build/options.inc
	@mkdir -p build/nvcc
	$(NVCC) -x cu -std=c++20 $(NVCC_DEMO_ARCH) -fmad=false -diag-suppress 1675 -Xcompiler $(NVCC_HOST) $(CPPFLAGS) $< -o $@ $(LDLIBS)

cuda: setup $(TRAINERS:%=build/cuda_%)
	@echo "$(if $(NCCL),with NCCL: ranks are threads or processes,without NCCL (no nccl.h or libnccl.so under $(CUDA)): ranks are threads of one process)"

# cuDNN: a folder with include/ and lib/, or where pip has put it.
CUDNN ?= $(shell python3 -c 'import nvidia.cudnn; print(list(nvidia.cudnn.__path__)[0])' 2>/dev/null)
CUDNN_DEMO = demos/09_cudnn_attention.cu demos/cudnn_attention.h
cudnn-folder: # for a script
	@echo $(CUDNN)

cudnn: setup
	@command -v $(NVCC) >/dev/null || { echo "make cudnn: no nvcc"; exit 1; }
	@test -e "$(CUDNN)/include/cudnn.h" || { echo "make cudnn: no cuDNN: pip install nvidia-cudnn-cu13, or CUDNN=folder with include/ and lib/"; exit 1; }
	@$(MAKE) --no-print-directory build/09_cudnn_attention

build/cudnn.o: $(CUDNN_DEMO) seqpar.h
	@mkdir -p build
	$(NVCC) -std=c++17 -O2 $(CUDA_ARCH) $(CPPFLAGS) -I$(CUDNN)/include $(LINKED) -c $< -o $@

build/09_cudnn_attention: build/cudnn.o build/cuda.o build/seqpar.o
	$(CC) $(CFLAGS) $^ -o $@ $(LDLIBS) -L$(CUDNN)/lib -l:libcudnn.so.9 -Wl,-rpath,$(abspath $(CUDNN))/lib $(CUDA_LIBS)

# The same upon a stand-in for cuDNN, without a GPU.
build/on_cpu_cudnn_attention: $(CUDNN_DEMO) seqpar_cuda.cu seqpar.h build/seqpar.o $(wildcard verify/stand_in/*.h)
	$(ON_CPU) -Wno-missing-field-initializers -include verify/stand_in/cudnn_on_cpu.h -include seqpar_cuda.cu -Idemos $(LINKED) -c $< -o build/on_cpu_cudnn.o
	$(CC) $(CFLAGS) build/on_cpu_cudnn.o build/seqpar.o -o $@ $(LDLIBS) -lstdc++

# ---- what ci/gpu.sh takes to a machine with a GPU: programs that need no compiler there ----
BUNDLE = build/gpu
BUNDLE_TESTS = $(DEVICES) attn queue cuda_step cublas
BUNDLE_TRAINERS = train_sft train_dpo train_rm train_ppo
# An old-style rpath: it also holds for what the libraries in lib need of each other.
BUNDLE_FLAGS = -std=gnu11 -O2 -march=x86-64-v3 -fopenmp $(WARN) -Wl,--as-needed -Wl,--disable-new-dtags -Wl,-rpath,'$$ORIGIN/lib'
BUNDLE_LIBS = -L$(BUNDLE)/lib -lseqpar_cuda -L$(CUDA)/lib64 -lcudart $(LDLIBS)
BUNDLE_NEEDS = build/bundle/seqpar.o $(BUNDLE)/lib/libseqpar_cuda.so
BUNDLE_COPIES = ci/gpu.sh bench/peer_torch_gpu.py
BUNDLE_PROGRAMS = $(BUNDLE_TESTS:%=test_%) $(BUNDLE_TRAINERS) verify bench_gpu make_arith compare_runs

# The kernels are in one library, or each program would hold them.
$(BUNDLE)/lib/libseqpar_cuda.so: seqpar_cuda.cu seqpar.h
	@mkdir -p $(@D)
	$(NVCC) -std=c++17 -O3 -fmad=false --threads 2 -shared -Xcompiler -fPIC -cudart shared -DSEQPAR_CUBLAS $(BUNDLE_WIDTHS) -I. $(CUDA_ARCH) $< -o $@ -lcublas

build/bundle/seqpar.o: verify/library.c verify/seqpar_check.h $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(BUNDLE_FLAGS) -c $< -o $@
$(BUNDLE)/test_%: verify/tests/test_%.c $(BUNDLE_NEEDS) $(TEST_HEADERS)
	$(CC) $(CPPFLAGS) $(BUNDLE_FLAGS) $(LINKED) -DTEST_CUDA $< build/bundle/seqpar.o -o $@ $(BUNDLE_LIBS)
$(BUNDLE)/verify: verify/verify.c $(BUNDLE_NEEDS) $(TEST_HEADERS)
	$(CC) $(CPPFLAGS) $(BUNDLE_FLAGS) $(LINKED) -DTEST_CUDA $< build/bundle/seqpar.o -o $@ $(BUNDLE_LIBS)
$(BUNDLE)/train_ppo: LDLIBS += -lcurl
$(BUNDLE)/train_%: demos/train_%.c $(BUNDLE_NEEDS) $(TRAINER_HEADERS) build/options.inc
	$(CC) $(CPPFLAGS) $(BUNDLE_FLAGS) $(LINKED) -DDEMO_CUDA $< build/bundle/seqpar.o -o $@ $(BUNDLE_LIBS)
$(BUNDLE)/test_nccl_gpus: verify/tests/test_nccl_gpus.c verify/support/transport.h verify/stand_in/nccl_world.h $(BUNDLE_NEEDS)
	$(CC) $(CPPFLAGS) $(BUNDLE_FLAGS) $(LINKED) -DTEST_CUDA $< build/bundle/seqpar.o -o $@ $(BUNDLE_LIBS) $(NCCL)
$(BUNDLE)/train_sft_nccl: demos/train_sft.c $(BUNDLE_NEEDS) $(TRAINER_HEADERS) build/options.inc
	$(CC) $(CPPFLAGS) $(BUNDLE_FLAGS) $(LINKED) -DDEMO_CUDA $< build/bundle/seqpar.o -o $@ $(BUNDLE_LIBS) $(NCCL)
$(BUNDLE)/bench_gpu: bench/bench_gpu.c bench/gpu.h bench/bench.h $(BUNDLE_NEEDS)
	$(CC) $(CPPFLAGS) $(BUNDLE_FLAGS) $(LINKED) $< build/bundle/seqpar.o -o $@ $(BUNDLE_LIBS)
$(BUNDLE)/%: demos/%.c $(BUNDLE_NEEDS) $(TRAINER_HEADERS)
	$(CC) $(CPPFLAGS) $(BUNDLE_FLAGS) $(LINKED) $< build/bundle/seqpar.o -o $@ $(BUNDLE_LIBS)
$(BUNDLE)/cudnn_attention: $(CUDNN_DEMO) $(BUNDLE_NEEDS)
	$(NVCC) -std=c++17 -O2 -arch=sm_90 $(CPPFLAGS) -I$(CUDNN)/include $(LINKED) -c $< -o build/bundle/cudnn.o
	$(CC) $(BUNDLE_FLAGS) build/bundle/cudnn.o build/bundle/seqpar.o -o $@ $(BUNDLE_LIBS) -L$(CUDNN)/lib -l:libcudnn.so.9 -lstdc++

# All that a program needs but the C library, the driver, cuBLAS and cuDNN lies in lib/, which its $$ORIGIN names.
gpu-bundle: setup $(BUNDLE_PROGRAMS:%=$(BUNDLE)/%) $(if $(CUDNN),$(BUNDLE)/cudnn_attention) $(if $(NCCL),$(BUNDLE)/test_nccl_gpus $(BUNDLE)/train_sft_nccl)
	@cp $(BUNDLE_COPIES) $(BUNDLE)/
	@bash ci/bundle.sh $(BUNDLE)
	@$(if $(CUDNN),,echo "without the cuDNN demo: no cuDNN 9.21 here (pip install nvidia-cudnn-cu13, or CUDNN=folder)")
	@$(if $(NCCL),,echo "without NCCL: no nccl.h and libnccl.so under $(CUDA)")

# On this machine's GPU. BENCH_RESULTS=1: the page goes to bench/results/.
check-gpu: gpu-bundle
	@GPU_SECONDS=$${GPU_SECONDS:-1800} GPU_PARTS="verify attn device train train_bf16 step queue cublas verify_cublas nccl train_nccl memcheck racecheck cudnn" bash ci/gpu.sh $(BUNDLE)
bench-gpu: gpu-bundle
	@GPU_PARTS="bench ncu" bash ci/gpu.sh $(BUNDLE)

# ---- the library for other languages, and what others build with ----
# Names of functions change from one minor version to the next, so the soname has both numbers.
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
SHARED = build/libseqpar.so
VERSION = $(shell sed -n 's/^\#define SEQPAR_VERSION  *"\(.*\)"/\1/p' seqpar.h)
SONAME = libseqpar.so.$(basename $(VERSION))

shared: $(SHARED)
$(SHARED): seqpar.h
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -fPIC -fvisibility=hidden -fno-semantic-interposition -DSEQPAR_IMPLEMENTATION '-DSEQPAR_DEF=extern __attribute__((visibility("default")))' -shared -Wl,-soname,$(SONAME) -Wl,-z,defs -x c $< -o $@ -lm -lpthread
	@ln -sf $(@F) $(@D)/$(SONAME)

TO = $(DESTDIR)$(PREFIX)
TO_LIB = $(DESTDIR)$(LIBDIR)
install: $(SHARED)
	install -d $(TO)/include $(TO)/share/pkgconfig $(TO)/share/cmake/seqpar $(TO)/share/doc/seqpar $(TO_LIB)/pkgconfig
	install -m 644 $(HEADERS) seqpar_cuda.cu $(TO)/include
	install -m 644 ci/install/seqpar-config.cmake ci/install/seqpar-config-version.cmake $(TO)/share/cmake/seqpar
	install -m 644 LICENSE $(TO)/share/doc/seqpar
	sed 's/@VERSION@/$(VERSION)/' ci/install/seqpar.pc.in | install -m 644 /dev/stdin $(TO)/share/pkgconfig/seqpar.pc
	sed 's/@VERSION@/$(VERSION)/' ci/install/seqpar-shared.pc.in | install -m 644 /dev/stdin $(TO_LIB)/pkgconfig/seqpar-shared.pc
	install -m 755 $(SHARED) $(TO_LIB)/libseqpar.so.$(VERSION)
	ln -sf libseqpar.so.$(VERSION) $(TO_LIB)/$(SONAME)
	ln -sf $(SONAME) $(TO_LIB)/libseqpar.so
uninstall:
	rm -rf $(TO)/share/cmake/seqpar $(TO)/share/doc/seqpar
	rm -f $(HEADERS:%=$(TO)/include/%) $(TO)/include/seqpar_cuda.cu $(TO)/share/pkgconfig/seqpar.pc $(TO_LIB)/pkgconfig/seqpar-shared.pc
	rm -f $(TO_LIB)/libseqpar.so $(TO_LIB)/$(SONAME) $(TO_LIB)/libseqpar.so.$(VERSION)

# ---- the oracle as wheels, for machines without a compiler (verify/python) ----
# WHEELS=x86_64: that one alone. CJSON=FOLDER: with cJSON.c and cJSON.h, in the place of Debian's source package.
WHEELS ?= x86_64 aarch64
CJSON ?=
IN_WHEEL = build/wheel
WHEEL_BINARIES = $(WHEELS:%=$(IN_WHEEL)/%/seqpar-verify)
# The oldest processor of each kind. No OpenMP: its library would have to come with it.
CPU_x86_64 = x86_64
CPU_aarch64 = generic
ZIG = ZIG_GLOBAL_CACHE_DIR=$(CURDIR)/$(IN_WHEEL)/cache ZIG_LOCAL_CACHE_DIR=$(CURDIR)/$(IN_WHEEL)/cache $(IN_WHEEL)/venv/bin/python -m ziglang cc
WHEEL_CC = @mkdir -p $(@D); echo "$@"; $(ZIG) -target $*-linux-gnu.2.17 -mcpu=$(CPU_$*) -std=gnu11 -O3 -w -D_GNU_SOURCE $(CPPFLAGS) -isystem $(IN_WHEEL)/include

wheel: setup $(WHEEL_BINARIES)
	@bash ci/wheel.sh $(WHEELS)
$(IN_WHEEL)/tools: ci/wheel_tools.sh
	@CJSON=$(CJSON) bash ci/wheel_tools.sh
$(WHEELS:%=$(IN_WHEEL)/%/seqpar.o): $(IN_WHEEL)/%/seqpar.o: verify/library.c verify/seqpar_check.h $(HEADERS) $(IN_WHEEL)/tools
	$(WHEEL_CC) -c $< -o $@
$(WHEELS:%=$(IN_WHEEL)/%/self_test.o): $(IN_WHEEL)/%/self_test.o: verify/verify.c $(SELF_TEST_HEADERS) $(IN_WHEEL)/%/seqpar.o
	$(WHEEL_CC) $(LINKED) -Dmain=seqpar_verify_test -c $< -o $@
$(WHEEL_BINARIES): $(IN_WHEEL)/%/seqpar-verify: verify/seqpar_verify.c $(IN_WHEEL)/%/seqpar.o $(IN_WHEEL)/%/self_test.o $(OF_ORACLE_HEADERS)
	$(WHEEL_CC) $(FAST_ROOTS) $(LINKED) -I$(IN_WHEEL)/include/cjson -s $< $(IN_WHEEL)/cJSON.c $(@D)/seqpar.o $(@D)/self_test.o -o $@ -lm -lpthread

clean:
	rm -rf build dist
endif
