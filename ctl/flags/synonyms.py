"""What other tools call the flags of ctl, for the message about a flag that there is not."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection

from ctl.base.names import HOLD_OUT

# What to write here, and the names, which may be patterns, that Keras, Lightning, Transformers,
# timm and the scripts of papers have for it. The first that matches counts.
SYNONYMS = {
    "--learning_rate": "lr base_lr init_lr initial_lr max_lr peak_lr initial_learning_rate",
    "--end_learning_rate": "min_lr end_lr final_lr eta_min",
    "--schedule": "lr_scheduler* lr_schedule scheduler sched lr_policy lr_decay*",
    "--warmup=500 for steps, --warmup=5ep for epochs": "warmup_* num_warmup_steps lr_warmup*",
    "--optimizer": "optim opt optimizer_name",
    "--optimizer=nesterov": "nesterov use_nesterov",
    "--weight_decay": "wd",
    "--clip_norm": "gradient_clip_val max_grad_norm grad_clip* clip_grad* clipnorm global_clipnorm",
    "--accumulate_steps": "accumulate_grad* gradient_accum* grad_accum* accum_iter accum_steps",
    "--label_smoothing": "smoothing",
    "--class_weight": "class_weights",
    "--ema_decay": "ema model_ema* use_ema",
    "--loss": "criterion loss_fn",
    "--on_nan": "terminate_on_nan skip_nan",
    "--precision=mixed_float16": "fp16 amp use_amp mixed_precision half float16",
    "--precision=mixed_bfloat16": "bf16 bfloat16",
    "--precision": "dtype",
    "--jit_compile": "compile xla jit torch_compile",
    "--eager": "run_eagerly run_eager",
    "--global_batch_size, the examples per update of all replicas together": (
        "batch_size batchsize batch bs train_batch_size per_device_*batch_size micro_batch_size"
    ),
    "--train_steps": (
        "max_steps num_steps n_steps steps total_steps num_train_steps max_iters num_iters "
        "iterations train_iters"
    ),
    "--epochs": "max_epochs num_epochs n_epochs num_train_epochs nb_epoch",
    "--steps_per_loop, which changes no result": "steps_per_execution",
    "--model_dir": (
        "output_dir out_dir outdir log_dir logdir save_dir savedir checkpoint_dir "
        "ckpt_dir default_root_dir work_dir workdir run_dir job_dir exp_dir experiment_dir"
    ),
    "--model_dir: the same command with the same directory resumes": (
        "resume* ckpt_path restore restore_from* continue* load_checkpoint auto_resume"
    ),
    "--init_from": "pretrained* weights init_checkpoint load_weights finetune* initial_weights",
    "--evaluate_every=500 for steps, --evaluate_every=2ep for epochs": (
        "val_check_interval val_every* val_freq* val_interval validation_freq* "
        "validation_steps_interval check_val_every_n_epoch eval_every eval_steps eval_interval "
        "eval_freq* eval_strategy evaluation_strategy"
    ),
    f"{HOLD_OUT}, for any share": "validation_split val_split test_split test_size val_ratio",
    "--eval_split for the data, --evaluate_every for how often": "val val_* validation* test_*",
    "--checkpoint_every": (
        "save_every* save_steps save_interval save_freq* checkpoint_interval checkpoint_freq* "
        "every_n_train_steps save_strategy"
    ),
    "--evaluate_every=STEPS; an epoch is the data once, see --epochs": "steps_per_epoch",
    "--early_stop, --keep_best or --schedule=plateau; callbacks of Keras are for Python": (
        "callbacks callback"
    ),
    "--keep": "save_total_limit max_to_keep keep_last* keep_checkpoint*",
    "--keep_best": "save_top_k save_best* save_best_only",
    "--restore_best_weights": "load_best* restore_best",
    "--best_metric": "monitor metric_for_best_model",
    "--best_mode": "mode greater_is_better",
    "--early_stop=loss:5": "early_stopping* patience earlystop*",
    "--log_every": (
        "log_every_n_steps logging_steps log_interval log_freq* log_steps print_freq verbose"
    ),
    "--profile_steps=20:30": "profile profiler profile_batch",
    "--wandb": "wandb_project use_wandb report_to",
    "--dry_run": "fast_dev_run dryrun sanity_check",
    "--seed": "random_seed manual_seed rng_seed",
    "--replicas": "gpus num_gpus n_gpus n_gpu ngpus devices num_devices n_devices nproc_per_node",
    "--strategy": "distributed distribution* distribute* accelerator ddp device num_processes",
    "--workers for the processes of a job; reading data needs no flag": "num_workers n_workers",
    "--workers": "num_nodes nodes n_nodes nnodes world_size hosts",
    "--worker_index": "node_rank rank local_rank global_rank machine_rank",
    "--model": "arch architecture network net backbone model_name*",
    "--num_classes, for --dataset=synthetic; other data know it": "classes n_classes nb_classes",
    "--dataset": "data dataset_name data_name train_data train_dataset",
    "--data_dir": "data_path data_root dataset_dir dataset_path data_folder train_dir",
    "--image_shape=HEIGHT,WIDTH,CHANNELS": "img_size image_size input_size img_shape input_shape",
    "--augment": "augmentation* data_augmentation transforms aa auto_augment random_crop",
    "--train_split": "split",
}


def here(name: str, flags: Collection[str]) -> str | None:
    """What to write for the flag ``name`` of another tool, where all ``flags`` that it takes exist;
    None if no such thing is known."""
    name = name.lower().replace("-", "_")
    for advice, names in SYNONYMS.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in names.split()):
            return advice if {*re.findall(r"--(\w+)", advice)} <= {*flags} else None
    return None
