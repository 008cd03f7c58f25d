"""Words of a training roadmap, of nanoGPT and of Hugging Face's Trainer lead to techniques and settings."""

import pytest

from chatgot.config.config import Config, as_option, meanings, setting_names, unknown_setting
from chatgot.techniques.base import TECHNIQUE_CLASSES
from tensorkeep import UnsupportedError

# The techniques, flags and configuration keys of a training roadmap, and what an error suggests first.
ROADMAP = """
    Mixed Precision Training          --technique mixed-precision
    amp                               --technique mixed-precision
    use_amp                           --technique mixed-precision
    autocast                          --technique mixed-precision
    GradScaler                        --technique mixed-precision
    float16                           --technique mixed-precision
    fp16                              --techniques.mixed-precision.dtype fp16
    dtype                             --techniques.mixed-precision.dtype
    Gradient Checkpointing            --technique activation-checkpointing
    gradient_checkpointing            --technique activation-checkpointing
    Activation Checkpointing          --technique activation-checkpointing
    use_activation_checkpointing      --technique activation-checkpointing
    checkpoint_wrapper                --technique activation-checkpointing
    Gradient Accumulation             --technique gradient-accumulation
    Optimized Gradient Accumulation   --technique gradient-accumulation
    accumulate_grad_batches           --technique gradient-accumulation
    Memory Optimization Settings      --technique allocator
    PYTORCH_CUDA_ALLOC_CONF           --technique allocator
    expandable_segments               --techniques.allocator.expandable_segments
    allow_tf32                        --technique tf32
    compile                           --technique compile
    torch.compile                     --technique compile
    use_torch_compile                 --technique compile
    PyTorch 2.0+ Compilation          --technique compile
    compile_mode                      --techniques.compile.mode
    reduce-overhead                   --techniques.compile.mode reduce-overhead
    max-autotune                      --techniques.compile.mode max-autotune
    Flash Attention 2                 --technique attention-kernel
    flash-attention2                  --technique attention-kernel
    8-bit Optimizers                  --technique low-bit-optimizer
    8bit                              --technique low-bit-optimizer
    use_8bit                          --technique low-bit-optimizer
    AdamW8bit                         --technique low-bit-optimizer
    bitsandbytes                      --technique low-bit-optimizer
    bnb                               --technique low-bit-optimizer
    Activation Function Experiments   --technique activation-function
    SwiGLU                            --techniques.activation-function.activation swiglu
    GeGLU                             --techniques.activation-function.activation geglu
    CPU Offloading                    --technique optimizer-offload
    offload                           --technique optimizer-offload
    Model Parallelism                 --technique pipeline-parallel
    Tensor Parallelism                --technique tensor-parallel
    CUDA Graphs                       --technique cuda-graphs
    CPU Affinity Optimization         --technique cpu-threads
    cpu-affinity                      --technique cpu-threads
    Auto-tune scheduler               --technique lr-plateau
    lr-finder                         --technique lr-range-test
    Fused Kernel Operations           --technique fused-cross-entropy
    custom CUDA kernels               --technique triton-kernel
    Progressive Growing Sequence Length --technique progressive-length
    Dynamic Sparse Attention          --technique sparse-attention
    Curriculum-based Training         --technique length-curriculum
    Quantized Forwarding              --technique quantised-forward
    Optimal Buffer Swapping           --technique activation-swapping
    buffer-swapping                   --technique activation-swapping
    learning_rate                     --optim.lr
    weight_decay                      --optim.weight_decay
    grad_clip                         --optim.grad_clip
    eps                               --optim.eps
    batch_size                        --loop.batch_size
    device                            --loop.device
    use_gpu                           --loop.device
    benchmark_epochs                  --loop.steps
    benchmark_iterations              --loop.steps
    data_path                         --data.source
    processed_data_path               --data.source
    vocab_size                        --model.vocab_size
    d_model                           --model.d_model
    n_head                            --model.n_heads
    d_hid                             --model.d_ff
    n_layers                          --model.n_layers
    dropout                           --model.dropout
"""
# Of nanoGPT and Hugging Face's Trainer.
OTHERS = """
    max_iters                         --loop.steps
    max_steps                         --loop.steps
    eval_interval                     --eval.every
    log_interval                      --log.every
    gradient_accumulation_steps       --loop.gradient_accumulation_steps
    block_size                        --model.context_length
    n_layer                           --model.n_layers
    n_embd                            --model.d_model
    warmup_iters                      --schedule.warmup_steps
    min_lr                            --schedule.final
    wandb_project                     --log.wandb
    save_steps                        --checkpoint.every
    save_total_limit                  --checkpoint.keep_last
    max_grad_norm                     --optim.grad_clip
"""


@pytest.mark.parametrize("line", [line.strip() for line in (ROADMAP + OTHERS).splitlines() if line.strip()])
def test_a_word_of_another_program_leads_to_what_it_is_here(line: str) -> None:
    word, _, suggested = line.partition(" --")
    assert f"--{suggested}" == as_option(meanings(word.strip())[0])
    # Whichever way the word is written.
    assert meanings(word.strip().upper().replace("_", "-")) == meanings(word.strip())


def test_errors_suggest_what_a_word_means() -> None:
    with pytest.raises(UnsupportedError, match=r"did you mean --technique low-bit-optimizer\?"):
        TECHNIQUE_CLASSES.get("8bit")
    assert unknown_setting("optim.learning_rate").remedy == "did you mean optim.lr?"
    assert unknown_setting("xyzzy").remedy == "see tensorkeep train --list-settings"
    with pytest.raises(UnsupportedError, match="known: activation-checkpointing, activation-function"):
        TECHNIQUE_CLASSES.get("xyzzy")


def test_no_alias_hides_a_name_and_each_leads_to_a_setting_that_exists() -> None:
    names = TECHNIQUE_CLASSES.names()
    for name in [*setting_names(), *(f"techniques.{each}" for each in names)]:
        assert name in meanings(name), name
    for technique in TECHNIQUE_CLASSES:
        assert not set(technique.aliases) & set(names)
        assert all(f"techniques.{technique.name}" in meanings(each) for each in technique.aliases), technique
    for table in ("model", "data", "optim", "schedule", "loop", "eval", "sample", "checkpoint", "log"):
        kind = Config.__annotations__[table]
        fields = {each.rpartition(".")[2] for each in setting_names(kind)}
        assert kind.aliases and set(kind.aliases.values()) <= fields and not set(kind.aliases) & fields
