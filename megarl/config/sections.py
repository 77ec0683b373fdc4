"""The sections of the config: one class each, every field with its meaning under it.

Pure values, importable without torch; what two kinds of config share stands here once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from megarl.config.guard_rules import GuardConfig
from megarl.config.layout_section import LayoutConfig
from megarl.config.optimizer import OptimizerConfig
from megarl.config.option_sections import with_options
from megarl.config.presets import Fp8Format, Fp8RecipeName
from megarl.config.row_template import Template, with_prompt_key
from megarl.config.section import ClassPath, Count, NonNegative, Positive, Seconds, Section, TemplateChoice
from megarl.config.sources import OnChange, SourceConfig, held_out_defaults
from megarl.option_list import functions
from megarl.system.processor import computes_bfloat16


@with_options
class RunConfig(Section):
    """Length of the run, its folder, and when it saves and evaluates."""

    name: str = "run"
    """Name of the run. Its files go to `<run.folder>/<run.name>/`."""
    folder: str = "runs"
    """Folder that holds all runs."""
    seed: Count = 0
    """Seed of the data order, of new weights and of sampling."""
    steps: Positive = 100
    """Number of training steps. One step generates responses, scores them and updates the policy."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the rows of `data.train`, in place of `steps`: epochs times rows by rows of a step, rounded up. null: `steps`
    counts."""
    resume: str = "never"
    """`never`: start a new run. `auto`: continue from the newest checkpoint if there is one. A folder: continue from that
    checkpoint."""
    save_every: Count = 0
    """Save a checkpoint every this many steps. 0: only as `save_minutes` says, and at the end."""
    save_minutes: NonNegative = 30.0
    """Save a checkpoint after the step in which this many minutes have passed since the last one. 0: never."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints that stay on disk. 0: all."""
    keep_best: str | None = None
    """Also keep the checkpoint with the best value of this evaluation metric, e.g. `accuracy`. null: off."""
    max_restarts: Count = 2
    """How many times a run that lost a process is restarted from its newest checkpoint."""
    guards: Annotated[tuple[GuardConfig, ...], Field(strict=False)] = ()
    """Limits of metrics, and whether to skip the update, roll back or stop when a metric is beyond its limit."""
    eval_every: Count = 0
    """Evaluate on `data.eval` with greedy decoding every this many steps. 0: only before and after training."""
    eval_before: bool = True
    """Evaluate before the first step, too."""
    deterministic: bool = False
    """Use kernels that give bit-identical results in repeated runs; slower on GPUs (docs/checkpoints.md)."""
    log_samples: Count = 8
    """Number of samples written to `samples.jsonl` in every step."""
    export: bool = False
    """At the end, write the trained model as a Hugging Face folder to `<run.folder>/<run.name>/model/`."""

    @property
    def known_steps(self) -> int | None:
        """`steps`; None where `epochs` makes them of the number of rows."""
        return self.steps if self.epochs is None else None


@with_options
class ModelConfig(Section):
    """The model that the policy starts from, and how it is computed."""

    path: str
    """The model to train: a Hugging Face folder, a run that exported one, or an id of the hub, `ORG/NAME[@REVISION]`."""
    architecture: ClassPath | None = None
    """Model family of your own: an `Architecture` as `package.module:NAME` or `path/to/file.py:NAME`. null: the families that
    megarl has."""
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; reductions and optimizer state are in float32. `auto`: bfloat16 if this machine has a
    GPU, AVX512_BF16 or AMX, else float32."""
    layer_spec: Literal["auto", "transformer_engine", "local", "reference"] = "auto"
    """Megatron layer implementation. `auto`: transformer_engine if there is a GPU and it can be imported, else reference."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes anew: nothing, `full` layers, or `selective`: with transformer_engine MLPs, norms and
    experts' activations, else core attention."""
    fp8: Fp8Format = "none"
    """Matrix products in FP8 with Transformer Engine. `hybrid`: gradients in E5M2, the rest in E4M3. `e4m3`: all in E4M3."""
    fp8_recipe: Fp8RecipeName = "tensorwise"
    """FP8 scaling: `tensorwise` and `delayed` use one scale per tensor (`delayed`: from past maxima), `blockwise` one per
    128 values, `mxfp8` one per 32."""
    fp8_param: bool = False
    """Store the weights of FP8 products only in FP8. The optimizer's copy stays in float32."""
    fp8_bf16_layers: Annotated[tuple[Count, Count], Field(strict=False)] = (0, 0)
    """Number of layers at the start and at the end of the model that stay in BF16."""
    int4_experts: Literal[0, 32, 64, 128] = 0
    """Quantisation-aware training: policy and reference compute with experts' weights rounded to INT4, in groups of so many as
    the engines' folder has. 0: off."""

    @field_validator("dtype")
    @classmethod
    def _choose_dtype(cls, dtype: str) -> str:
        if dtype != "auto":
            return dtype
        return "bfloat16" if computes_bfloat16() else "float32"


class ExpertsConfig(Section):
    """Balance of experts (docs/experts.md). With all at 0 routing moves only as the loss of the run moves it."""

    balance_coef: NonNegative = 0.0
    """Coefficient of the balance loss over the whole batch of an update, which costs a forward pass more. 0: off."""
    sequence_balance_coef: NonNegative = 0.0
    """Coefficient of DeepSeek-V3's balance loss of each sequence (1e-4 there). 0: off."""
    z_loss_coef: NonNegative = 0.0
    """Coefficient of the z-loss, which keeps the logits of routers small (ST-MoE: 1e-3). 0: off."""
    bias_update_rate: NonNegative = 0.0
    """How far an update moves the bias of an expert against its load (DeepSeek-V3: 1e-3). 0: biases stay as they are."""


class TrainedRole(Section):
    """Fields that the policy and the critic share."""

    layout: LayoutConfig = LayoutConfig()
    """Parallel layout of this role."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of this role."""
    experts: ExpertsConfig = ExpertsConfig()
    """How experts are kept in balance, of a model that has any."""
    threads_per_rank: Positive | None = None
    """CPU threads per rank. null: the machine's cores divided by its ranks."""
    max_tokens_per_micro_batch: Positive = 8192
    """Maximum number of tokens packed into one micro-batch of one data-parallel rank."""
    static_shapes: bool = False
    """Pad each micro-batch to `max_tokens_per_micro_batch`: all have one shape, and pipeline stages send none. Results are the
    same; the padding is computed."""
    logit_chunk_tokens: Positive | None = None
    """Number of tokens whose logits are held in memory at once when log-probs are computed. null: as many as fit into 768 MiB
    (without a GPU: 64 MiB)."""
    freeze: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What is not trained: patterns of Hugging Face names (`*.layers.0.*`), `router`, or parts of a model that sees:
    `vision` (the tower), `projector`, `language` (the decoder)."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig, by their own names
    (docs/performance.md)."""

    @property
    def predicts(self) -> bool:
        """Return whether the role has a layer for multi-token prediction, which is trained."""
        return any(predicts(self) for predicts in functions("questions", "predicts"))

    @property
    def has_adapters(self) -> bool:
        """Return whether low-rank adapters are trained in place of the role's weights."""
        return any(has_adapters(self) for has_adapters in functions("questions", "has_adapters"))


@with_options
class PolicyConfig(TrainedRole):
    """The model being trained."""

    share_prefix: Literal["auto"] | bool = "auto"
    """Compute what responses begin with alike, the prompt and common turns, once per micro-batch. auto: where it pays."""


@with_options
class CriticConfig(TrainedRole):
    """The value model. Used only if the advantage estimator needs values, as `gae` does."""

    warmup_steps: Count = 0
    """Number of steps at the start in which only the critic is trained."""
    value_clip: NonNegative = 0.2
    """How far a value may move from the old value before the loss clips it. 0: no clipping."""
    init_from: str | None = None
    """Hugging Face folder whose layers the critic starts from. null: `model.path`."""


class ReferenceConfig(Section):
    """The model that the policy is kept near. Loaded only if `algorithm.kl.coef` is above 0 or the objective reads it."""

    path: str | None = None
    """Hugging Face folder of the reference model. null: `model.path`."""
    layout: LayoutConfig | None = None
    """Parallel layout of this model. null: it shares the policy's processes and layout."""
    megatron: dict[str, Any] | None = None
    """Fields of megatron-core's TransformerConfig. null: those of `policy.megatron`."""
    reset_every: Count = 0
    """Move the reference to the policy every this many steps (iterative GRPO, TR-DPO). 0: never."""
    reset_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the policy in the reference after `reset_every` (TR-DPO's alpha); the rest stays. 1: copy the policy."""

    def is_policy_as_it_began(self, policy: PolicyConfig, folder: str) -> bool:
        """Return whether it is the policy without what its adapters learn beside the model in `folder`: no second model
        is loaded."""
        return policy.has_adapters and self.path in (None, folder) and self.layout is None


class PictureFields(Section):
    """Pictures, videos and sounds in rows (docs/vision.md, docs/audio.md); the fields are those of a `data` section."""

    image_key: str | None = "images"
    """Key of a row's pictures, one or a list of them. null: rows have none there, and `<image>` is text like any other."""
    video_key: str | None = "videos"
    """Key of a row's videos, one or a list of them. null: rows have none there, and `<video>` is text like any other."""
    audio_key: str | None = "audios"
    """Key of a row's sounds, one or a list of them. null: rows have none there, and `<audio>` is text like any other."""
    image_folder: str | None = None
    """Folder that relative paths of pictures, videos and sounds start at. null: where the run is started."""
    min_pixels: Positive | None = None
    """Minimum pixels of a picture or frame; smaller ones are enlarged. null: the model's own limit."""
    max_pixels: Positive | None = None
    """Maximum pixels of a picture or frame; larger ones are reduced. null: the model's own limit."""
    fps: Annotated[float, Field(gt=0)] = 2.0
    """Number of frames that are used per second of a video."""
    max_frames: Annotated[int, Field(ge=2, strict=True)] = 16
    """Maximum number of frames of a video."""
    video: Literal["frames", "native"] = "frames"
    """`frames`: a video's frames are shown as pictures. `native`: in the model's own way (Qwen3-VL)."""
    media_folder: str | None = None
    """Folder that keeps pictures at their final size, and sounds; every node must see it. null: `media` in the run folder."""
    bad_pictures: Literal["error", "drop"] = "error"
    """What to do with rows whose pictures, videos or sounds cannot be used: stop with an `error`, or `drop` and count them."""

    def kept_in(self, run_folder: str) -> Path:
        """The media folder of a run in `run_folder`, absolute: ranks and engines may have another working folder."""
        return Path(self.media_folder or f"{run_folder}/media").absolute()


class PromptFields(Section):
    """Sources of prompts, and how they are made of rows."""

    train: SourceConfig
    """Rows to train on."""
    on_change: OnChange = "refuse"
    """Other rows of `train` at resume: `refuse`; `append`: finish the old order, then the added rows; `restart`: from the first
    row of the new data."""
    eval: SourceConfig | None = None
    """Rows to evaluate on; generated tasks default to 200 rows from seed 1000000. null: no evaluation."""
    prompt: Template | None = None
    """Template that makes the prompt of several columns of a row, such as `"{instruction}\\n{input}"`; it stands under
    `prompt_key` then. null: the row has it there."""
    prompt_key: str = "question"
    """Key of the prompt in a row. The prompt is text or a list of chat messages."""
    answer_key: str = "answer"
    """Key of the correct answer in a row; `a.b` is key `b` inside `a`, such as `reward_model.ground_truth`."""
    source_key: str | None = None
    """Key of the data source of a row: metrics of training are given for each source, too. null: for each part of a mixture."""
    system_prompt: str | None = None
    """System message before every prompt. null: none."""
    system_key: str | None = "system"
    """Key of a row's own system message, a text; rows may lack it. null: not read."""
    chat_template: TemplateChoice = "auto"
    """Apply the tokenizer's chat template. `auto`: if it has one. `always`: fail if it has none. `never`: plain text. A path
    that ends in `.jinja`: the template in that file in its place."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Options of the chat template, such as `enable_thinking: false`; a row's own `template_args` go before them."""
    ignore_fields: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Keys of messages, such as `name` or `reasoning_content`, that the chat template may leave out; `tools`: those of rows."""
    max_prompt_tokens: Positive = 512
    """Maximum length of a prompt in tokens."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with longer prompts: stop with an `error`, or `drop` and count them."""

    @model_validator(mode="before")
    @classmethod
    def _keep_held_out_rows_apart(cls, tree: Any) -> Any:
        return with_prompt_key(held_out_defaults(tree, "eval"))


@with_options
class DataConfig(PictureFields, PromptFields):  # the last base's fields come first
    """Prompts for training and evaluation."""


class RewardConfig(Section):
    """One source of reward. The reward of a sample is the weighted sum of all sources."""

    name: str
    """Name of a built-in reward, `package.module:function`, or `path/to/file.py:function`."""
    weight: float = 1.0
    """Weight of this reward in the sum."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward."""
    on_error: Literal["stop", "zero", "drop_group"] = "stop"
    """When this reward fails on a response (docs/rewards.md): `stop` the run, count `zero` for it, or `drop_group`: leave the
    response's whole prompt group out of the step."""
    strict_steps: Count = 1
    """Number of steps at the start of the run in which every failure stops it, whatever `on_error` says."""
    max_error_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Maximum share of the responses of a step, or of an evaluation, that this reward may fail on before the run stops."""
    ahead: bool | None = None
    """Judge the responses of a group when it is finished, while others are sampled. null: all rewards but functions that get
    several samples in one call."""


def reward_labels(names: Sequence[str]) -> list[str]:
    """Labels that the sources `names` count under in `Sample.rewards`: a name used again is `name#2`, `name#3` and so on."""
    return [f"{name}#{names[:index].count(name) + 1}" if name in names[:index] else name for index, name in enumerate(names)]


class WorkerDeadlines(Section):
    """Time limits of the driver for the training workers."""

    start_s: Seconds = 300.0
    """Time limit in seconds for workers to start and load the model, and for an engine to start."""
    step_s: Seconds = 1800.0
    """Time limit in seconds for one phase of a step on all ranks."""
    save_s: Seconds = 600.0
    """Time limit in seconds for writing a checkpoint."""


@with_options
class ResourcesConfig(Section):
    """Machines and places of processes."""

    placement: Literal["colocated", "separate"] = "colocated"
    """`colocated`: trainer and engines take turns on the same devices. `separate`: each has its own devices."""
    ray_address: str | None = None
    """Address of the Ray cluster. null: RAY_ADDRESS if it is set, else a local Ray that ends with the run."""
    gpu: str | None = None
    """GPU that `megarl plan` plans for: a kind such as h100, or a YAML file of your own. null: h100. Runs do not read it."""
    deadlines: WorkerDeadlines = WorkerDeadlines()
    """How long the driver waits for the training workers."""
