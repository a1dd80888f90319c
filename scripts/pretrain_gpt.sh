#!/usr/bin/env bash
# Pretrains a GPT, as Megatron-LM's examples do, on nodes that can vanish. On this machine:
#
#   bash scripts/pretrain_gpt.sh CHECKPOINTS VOCAB_FILE MERGE_FILE DATA_PREFIX
#
# DATA_PREFIX is what `bamboo preprocess` was given as --output-prefix, with _text_document behind it.
# It goes on from what CHECKPOINTS holds, so the same command starts it and starts it again.
# What is to be changed are the arrays below; flags behind the four arguments are added to them.
#
# Elsewhere than here: scripts/slurm/ calls this script with BAMBOO_LAUNCH="coordinator --host .. ",
# which says how the job is started; the nodes then join by themselves.
set -euo pipefail

CHECKPOINTS=${1:?give the folder for checkpoints, the vocabulary, the merges and the data prefix}
VOCAB_FILE=${2:?give the vocabulary, vocab.json}
MERGE_FILE=${3:?give the merges, merges.txt}
DATA_PREFIX=${4:?give the data prefix}
shift 4

# Nodes = pipelines x stages. With 8 nodes and 4 stages there are two pipelines.
NODES=${NODES:-8}
WORKERS_PER_NODE=${WORKERS_PER_NODE:-1} # the tensor parallel size: the GPUs of one node

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$WORKERS_PER_NODE"
    --pipeline-model-parallel-size 4
)

GPT_MODEL_ARGS=(
    --num-layers 12
    --hidden-size 512
    --num-attention-heads 8
    --seq-length 1024
    --max-position-embeddings 1024
)

TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 64
    --train-iters 50000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --lr 6.0e-4
    --min-lr 6.0e-5
    --lr-decay-style cosine
    --lr-warmup-iters 500
    --bf16
)

DATA_ARGS=(
    --data-path "$DATA_PREFIX"
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --split 949,50,1
)

CHECKPOINT_ARGS=(
    --save "$CHECKPOINTS"
    --load "$CHECKPOINTS"
    --save-interval 1000
)

BAMBOO_ARGS=(
    --bamboo-redundancy lazy
)

# exec: the signals that say that time is over, or that the job is cancelled, are the launcher's.
# shellcheck disable=SC2086  # several words
exec bamboo ${BAMBOO_LAUNCH:-run} --nodes "$NODES" --workers-per-node "$WORKERS_PER_NODE" \
    "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt_bamboo.py" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${CHECKPOINT_ARGS[@]}" \
    "${BAMBOO_ARGS[@]}" \
    "$@"
