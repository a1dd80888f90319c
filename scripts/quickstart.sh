#!/usr/bin/env bash
# Trains a small GPT on eight nodes, kills one of them in the middle of an iteration, and shows that
# the run ends with the losses and parameters of an undisturbed one, bit for bit. Read it from top to
# bottom: it is the tutorial. It needs Python 3.11 or newer, two cores and about three minutes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$BAMBOO_ROOT"
set_up requirements.txt
SECONDS=0

RUNS=runs/quickstart
DATA=$RUNS/data
rm -rf "$RUNS"

step() { printf '\n== %s\n' "$*"; }

# --- 1. Data -----------------------------------------------------------------------------------
# Two megabytes of English that every Python installation holds (its documentation), a GPT-2 style
# vocabulary trained on it, and Megatron's .bin and .idx. With a corpus of your own, start at
# `bamboo preprocess`: its flags are those of Megatron-LM's tools/preprocess_data.py.
step "Preparing text, vocabulary and token files in $DATA"
python -m megatron_bamboo.data.corpus --output "$DATA/corpus.jsonl"
python -m megatron_bamboo.data.train_tokenizer \
    --input "$DATA/corpus.jsonl" --vocab-size 2048 --output-dir "$DATA"
bamboo preprocess \
    --input "$DATA/corpus.jsonl" \
    --output-prefix "$DATA/corpus" \
    --vocab-file "$DATA/vocab.json" \
    --merge-file "$DATA/merges.txt" \
    --append-eod

# --- 2. The job --------------------------------------------------------------------------------
# Megatron's flags. Eight nodes and pipelines of four stages: two pipelines, each of them with eight
# microbatches in an iteration. Dropout and tied embeddings are on, as in Megatron by default.
JOB=(
    pretrain_gpt_bamboo.py
    --num-layers 8 --hidden-size 64 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1
    --micro-batch-size 1 --global-batch-size 16
    --train-iters 40 --lr 3e-3 --lr-warmup-iters 4 --clip-grad 1.0 --seed 1234
    --data-path "$DATA/corpus_text_document" --split 100,0,0
    --vocab-file "$DATA/vocab.json" --merge-file "$DATA/merges.txt"
)

# --- 3. An undisturbed run ---------------------------------------------------------------------
# Without redundancy: the same arithmetic as Megatron's own pipeline schedule.
step "Training undisturbed, without redundancy"
bamboo run --nodes 8 --job-dir "$RUNS/undisturbed" "${JOB[@]}" --bamboo-redundancy none

# --- 4. The same run, and a node dies ----------------------------------------------------------
# Each node now also keeps its successor's stage. node5 runs stage 1 of the second pipeline. In
# iteration 7 it gets a SIGKILL just before the backward pass of microbatch 3 (`1.0B3`: stage 1,
# chunk 0, backward, microbatch 3). Its shadow, node4, finishes that very iteration in its place.
# Any `kill -9` of a node's processes does the same; the injection only makes the moment exact.
step "Training again, and node5 dies in the middle of iteration 7"
bamboo run --nodes 8 --job-dir "$RUNS/disturbed" --inject "node5@iter7:1.0B3" \
    "${JOB[@]}" --bamboo-redundancy eager

# --- 5. Is anything different? -----------------------------------------------------------------
step "Comparing both runs bit for bit"
bamboo compare "$RUNS/undisturbed" "$RUNS/disturbed" || true

# One JSON object; the exit status is not zero if anything differs. The pause is counted from the
# SIGKILL to the shadow's first work in the victim's place, in iterations.
step "Summary"
python -m megatron_bamboo.observe.quickstart_summary \
    "$RUNS/undisturbed" "$RUNS/disturbed" --seconds "$SECONDS"
