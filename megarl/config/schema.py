"""What a run is: the typed tree, one section per class, one line under each leaf (the lines `megarl config` prints).

Pure values, importable without torch. Everything is frozen; what the user left out is filled in here, so a resolved
config shows every choice.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megarl.config import checks
from megarl.config.fp8 import Fp8Format, Fp8RecipeName
from megarl.config.layout_config import LayoutConfig
from megarl.config.presets import AdvantageName, AggregationName, KlEstimator, PolicyLossName, PresetName, fill_preset
from megarl.config.profile_config import ProfileConfig
from megarl.config.rollout_config import RolloutConfig
from megarl.config.section import Count, Decay, Fraction, ImportPath, NonNegative, Positive, Seconds, Section

HELD_OUT_ROWS, HELD_OUT_SEED = 200, 1_000_000
"""`limit` and `seed` of `data.eval` where it does not say: procedural rows keep clear of the training rows."""


class RunConfig(Section):
    """How long the run is, where it writes, and when it saves and evaluates."""

    name: str = "run"
    """Name of the run; its files go to `<run.folder>/<run.name>/`."""
    folder: str = "runs"
    """Folder that holds all runs."""
    seed: Count = 0
    """Seed of data order, initialisation and sampling."""
    steps: Positive = 100
    """Training steps; one step is one round of generate, reward, update."""
    resume: str = "never"
    """`never` starts anew, `auto` continues from the newest checkpoint if there is one, else a checkpoint folder."""
    save_every: Count = 0
    """Save a checkpoint every so many steps; 0: only at the end."""
    keep_checkpoints: Count = 2
    """Newest checkpoints kept on disk; 0: all."""
    keep_best: str | None = None
    """Evaluation metric, such as `accuracy`: the checkpoint with its best value is kept besides; null: none."""
    restarts: Count = 2
    """Times that a run which lost a process is started again from its newest checkpoint."""
    guards: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What a metric must not do, such as `stop if kl/reference above 0.5 for 3 steps`; also `skip` and `rollback`."""
    eval_every: Count = 0
    """Evaluate on `data.eval` (greedily) every so many steps; 0: only before and after training."""
    deterministic: bool = False
    """Ranks compute with kernels that give the same bits again, which costs some speed on GPUs (docs/reliability.md)."""
    log_samples: Count = 8
    """Samples written to `samples.jsonl` per step."""
    export: bool = False
    """At the end, write the trained model as a Hugging Face folder `<run.folder>/<run.name>/model/`."""


class ModelConfig(Section):
    """The model that the policy starts from, and how it is computed."""

    path: str
    """Hugging Face folder of the model to train."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; reductions and optimizer state stay in float32."""
    layer_spec: Literal["auto", "transformer_engine", "local", "reference"] = "auto"
    """Megatron layer implementation; `auto`: transformer_engine where there is a GPU and it imports, else reference."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass: none, core attention only, or whole layers."""
    fp8: Fp8Format = "none"
    """Matrix products in FP8 (Transformer Engine): `hybrid` has gradients in E5M2, `e4m3` has all in E4M3."""
    fp8_recipe: Fp8RecipeName = "tensorwise"
    """What shares a scale in FP8: a tensor (delayed: by its history), a block of 128 numbers, or 32 of them (mxfp8)."""
    fp8_param: bool = False
    """Keep the weights of FP8 products in FP8 only (the optimizer's copy stays in float32)."""
    fp8_bf16_layers: Annotated[tuple[Count, Count], Field(strict=False)] = (0, 0)
    """Layers at the start and at the end of the model that stay in BF16."""


class OptimizerConfig(Section):
    """AdamW with a learning-rate schedule."""

    lr: NonNegative = 1e-6
    """Peak learning rate."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the cosine or linear schedule."""
    warmup_steps: Count = 0
    """Steps of linear warm-up from 0 to `lr`."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's term in the denominator."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    clip_grad: NonNegative = 1.0
    """Global gradient norm is clipped to this; 0: not clipped."""
    offload_fraction: Fraction = 0.0
    """Share of the optimizer's state that lives in main memory, where its part of the step is computed too."""


class TrainedRole(Section):
    """What the policy and the critic have in common."""

    layout: LayoutConfig = LayoutConfig()
    """Parallel layout of this role."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of this role."""
    threads_per_rank: Positive | None = None
    """CPU threads per rank; null: the machine's cores shared by the ranks on it."""
    max_tokens_per_micro_batch: Positive = 8192
    """Tokens packed into one micro-batch of one data-parallel rank, at most."""
    logit_chunk_tokens: Positive | None = None
    """Tokens whose logits exist at once when log-probs are computed; null: those whose logits take 64 MiB."""


class PolicyConfig(TrainedRole):
    """The model being trained."""

    share_prompts: bool = False
    """Compute a group's common prompt once per micro-batch instead of once per response."""


class CriticConfig(TrainedRole):
    """The value model; used only where the advantage needs values (gae)."""

    warmup_steps: Count = 0
    """Steps at the start in which only the critic is trained."""
    clip_range: NonNegative = 0.2
    """Value clipping around the old value; 0: not clipped."""
    init_from: str | None = None
    """Hugging Face folder whose body the critic starts from; null: `model.path`."""


class ReferenceConfig(Section):
    """The frozen model that the KL term measures against; loaded only where `algorithm.kl.coef` is above 0."""

    path: str | None = None
    """Hugging Face folder; null: `model.path`."""
    layout: LayoutConfig | None = None
    """Parallel layout; null: lives in the policy's processes, in the policy's layout."""
    reset_every: Count = 0
    """Set the reference to the policy every so many steps (the outer iterations of iterative GRPO); 0: never."""


class RewardModelConfig(Section):
    """A scalar-head model that scores responses, beside or instead of the functions in `rewards`."""

    path: str | None = None
    """Hugging Face folder of the reward model; null: none."""
    layout: LayoutConfig | None = None
    """Parallel layout; null: lives in the policy's processes, in the policy's layout."""
    weight: float = 1.0
    """Weight of its score in the sum of all rewards."""
    process: bool = False
    """It scores every step of a response, each ending with a newline or the response, for `grpo_process`."""


class KlConfig(Section):
    """The penalty for leaving the reference; it acts in exactly one place."""

    coef: NonNegative = 0.04
    """Weight of the penalty; 0: no reference model is loaded."""
    estimator: KlEstimator = "k3"
    """Estimator of the KL per token (METHODS section 4)."""
    where: Literal["loss", "reward"] = "loss"
    """Added to the loss, or subtracted from the reward of every token."""
    unbiased: bool = False
    """In the loss: multiply the estimate by the ratio to the policy that sampled (for several updates per step)."""
    target: Annotated[float, Field(gt=0)] | None = None
    """In the reward: steer `coef` towards this mean KL of a response, in nats; null: `coef` stays."""
    horizon: Annotated[float, Field(gt=0)] = 10_000.0
    """Responses over which `target` moves `coef`."""


class CorrectionConfig(Section):
    """Correction for the engine's log-probs not being the trainer's (METHODS section 1); off where `mode` is none."""

    mode: Literal["none", "tis_token", "tis_sequence", "mis_token", "mis_sequence", "reject_sequence"] = "none"
    """Truncated or masked importance sampling per token or sequence, or whole responses rejected."""
    low: NonNegative = 0.5
    """Smallest ratio that is kept (mis, reject)."""
    high: Annotated[float, Field(gt=0)] = 2.0
    """Largest ratio that is kept (mis, reject), or the ratio that weights are cut at (tis)."""


class ShapingConfig(Section):
    """What is done to rewards before the advantage, in this order: penalties, normalisation, clipping (METHODS section 6)."""

    overlong_tokens: Count = 0
    """The last so many tokens before `rollout.max_new_tokens` cost up to 1 (DAPO's soft over-long penalty); 0: off."""
    length_penalty: NonNegative = 0.0
    """Subtracted from the reward for every response token."""
    normalise: bool = False
    """Divide by the standard deviation of all rewards so far, after subtracting their mean."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Rewards are clipped to [-x, x]; null: not clipped."""


class AlgorithmConfig(Section):
    """The maths of a step. `name` fills in whatever is left out here; what it filled in is in the resolved config."""

    name: PresetName = "grpo"
    """Preset for the leaves marked 'by name'."""
    advantage: AdvantageName | ImportPath = "grpo"
    """Advantage estimator (METHODS section 3), or your own as `package.module:function`."""
    policy_loss: PolicyLossName | ImportPath = "clip"
    """Policy loss per token (METHODS section 1), or your own as `package.module:function`."""
    aggregation: AggregationName = "seq_mean_token_mean"
    """How token losses become one number (METHODS section 2)."""
    norm_length: Positive | None = None
    """The constant L of `seq_mean_token_sum_norm`; null: `rollout.max_new_tokens`."""
    clip_low: NonNegative = 0.2
    """Ratio clipping below 1 (epsilon low)."""
    clip_high: NonNegative = 0.2
    """Ratio clipping above 1 (epsilon high; DAPO: 0.28)."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """The bound c of `dual_clip` for negative advantages."""
    penalty_coef: NonNegative = 1.0
    """The weight beta of `kl_penalty`'s KL to the policy that sampled."""
    epochs: Positive = 1
    """Passes over the sequences of one step (mu)."""
    mini_batches: Positive = 1
    """Optimizer steps per pass: the step's sequences are split into so many mini-batches."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 1.0
    """Lambda of generalised advantage estimation."""
    advantage_eps: NonNegative = 1e-6
    """Added to the standard deviation that advantages are divided by."""
    unbiased_std: bool = True
    """Standard deviation with n-1 (true) or n (false) in the denominator."""
    kl: KlConfig = KlConfig()
    """Penalty for leaving the reference."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus in the policy loss."""
    shaping: ShapingConfig = ShapingConfig()
    """What is done to rewards before the advantage."""
    truncated: Literal["keep", "mask", "bootstrap"] = "keep"
    """Responses cut by the length limit: like others, out of loss and denominators, or (gae) the critic's value follows."""
    correction: CorrectionConfig = CorrectionConfig()
    """Correction for the engine's log-probs not being the trainer's."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_name(cls, tree: Any) -> Any:
        return fill_preset(tree)


class SourceConfig(Section):
    """Where rows come from."""

    source: Literal["reasoning_gym", "jsonl", "parquet", "dataset", "python", "mixture"] = "reasoning_gym"
    """Kind of source; `dataset`: a Hugging Face datasets folder; `mixture`: several sources, by weight."""
    name: str | None = None
    """Task name (reasoning_gym) or `package.module:function` (python)."""
    path: str | None = None
    """File of rows (jsonl, parquet), or folder of them (dataset)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the task or function."""
    limit: Positive | None = None
    """Rows used: how many a procedural source makes, the first so many of a file; null: all (procedural: 1000)."""
    seed: Count = 0
    """Seed of a procedural source; row i is made from seed + i."""
    fields: dict[str, str] = Field(default_factory=dict)
    """New names for keys of a row, as `new: name in the row`; the others stay."""
    parts: Annotated[tuple[SourceConfig, ...], Field(strict=False)] = ()
    """The sources of a mixture; its own `limit` is of each of them."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """In a mixture: how often a row comes from this part, against the other parts' weights."""


class PtxConfig(Section):
    """Supervised examples mixed into every policy update, as in InstructGPT's PPO-ptx (METHODS section 7)."""

    coef: NonNegative = 0.0
    """Weight of their mean cross-entropy per token in the policy loss; 0: none are read."""
    samples_per_step: Positive = 8
    """Examples per pass over a step's samples, shared by its mini-batches."""
    data: SourceConfig | None = None
    """Rows with `data.prompt_key` and `response`; null: none. Its `fields` renames other keys."""


class DataConfig(Section):
    """Prompts for training and evaluation."""

    train: SourceConfig
    """Rows to train on."""
    eval: SourceConfig | None = None
    """Rows to evaluate on, 200 from seed 1000000 unless it says otherwise; null: no evaluation."""
    prompt_key: str = "question"
    """Key of the prompt in a row: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Key of the gold answer in a row."""
    system_prompt: str | None = None
    """System message put before every prompt; null: none."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Apply the tokenizer's chat template: where it has one, always (its absence is an error), or never."""
    max_prompt_tokens: Positive = 512
    """Longest prompt in tokens."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What a longer prompt is: an error, or a row that is dropped and counted."""

    @model_validator(mode="before")
    @classmethod
    def _keep_held_out_rows_apart(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and isinstance(tree.get("eval"), dict):
            return tree | {"eval": {"limit": HELD_OUT_ROWS, "seed": HELD_OUT_SEED} | tree["eval"]}
        return tree


class RewardConfig(Section):
    """One source of reward; the reward of a sample is the weighted sum of all."""

    name: str
    """Name of a built-in reward, or `package.module:function`, or `path/to/file.py:function`."""
    weight: float = 1.0
    """Weight in the sum."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward."""


class WorkerDeadlines(Section):
    """How long the driver waits for the training workers."""

    start_s: Seconds = 300.0
    """Seconds until all workers have joined and loaded the model, and until an engine has started."""
    step_s: Seconds = 1800.0
    """Seconds until one phase of a step is done on every rank."""
    save_s: Seconds = 600.0
    """Seconds until a checkpoint is written."""


class ResourcesConfig(Section):
    """Where processes run."""

    placement: Literal["colocated", "separate"] = "colocated"
    """Trainer and engines on the same devices in turns, or each on its own."""
    ray_address: str | None = None
    """Ray cluster to join; null: RAY_ADDRESS if it is set, else a local Ray that ends with the run."""
    deadlines: WorkerDeadlines = WorkerDeadlines()
    """How long the driver waits for the training workers."""


class TrackersConfig(Section):
    """Where metrics go besides `metrics.jsonl`."""

    to: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], Field(strict=False)] = ()
    """Trackers, all of which write into the run folder: wandb unless WANDB_MODE=online, mlflow unless MLFLOW_TRACKING_URI."""
    project: str = "megarl"
    """Project of wandb, experiment of mlflow."""


class Config(Section):
    """A whole run. Built by `load_config` or `parse_config`, which turn every problem into one sentence."""

    run: RunConfig = RunConfig()
    """How long the run is, where it writes, and when it saves and evaluates."""
    model: ModelConfig
    """The model that the policy starts from, and how it is computed."""
    policy: PolicyConfig = PolicyConfig()
    """The model being trained."""
    critic: CriticConfig = CriticConfig()
    """The value model; used only where the advantage needs values (gae)."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model that the KL term measures against."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """A scalar-head model that scores responses."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The maths of a step."""
    data: DataConfig
    """Prompts for training and evaluation."""
    ptx: PtxConfig = PtxConfig()
    """Supervised examples mixed into every policy update."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are sampled."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False)] = ()
    """Sources of reward; a sample's reward is their weighted sum."""
    resources: ResourcesConfig = ResourcesConfig()
    """Where processes run."""
    trackers: TrackersConfig = TrackersConfig()
    """Where metrics go besides `metrics.jsonl`."""
    profile: ProfileConfig = ProfileConfig()
    """Steps that torch's profiler records."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Config:
        checks.check_fields_agree(self)
        return self

    @property
    def uses_critic(self) -> bool:
        """Whether the advantage needs a value model."""
        return self.algorithm.advantage == "gae"

    @property
    def uses_reference(self) -> bool:
        """Whether a KL penalty is computed, and so a frozen reference model is loaded."""
        return self.algorithm.kl.coef > 0

    @property
    def uses_reward_model(self) -> bool:
        """Whether a reward model scores the responses."""
        return self.reward_model.path is not None

    @property
    def run_folder(self) -> str:
        """`<run.folder>/<run.name>`."""
        return f"{self.run.folder}/{self.run.name}"
