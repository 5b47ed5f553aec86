"""Frozen settings, grouped by owner. Flags, environment names, YAML keys and help text are all derived from these Structs
(trireme/settings.py), so bounds and wording live here and nowhere else. `Meta(description=...)` is the help.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# Per step. GEMMs on a CPU are as fast with 256 tokens as with 2048, and the first token waits less.
CPU_ROWS, CPU_TOKENS = 64, 256
GPU_ROWS, GPU_TOKENS = 256, 16384
LEAST_QUEUE = 16384


def _text(description: str) -> Meta:
    return Meta(description=description)


def _count(description: str, ge: int, le: int | None = None) -> Meta:
    return Meta(ge=ge, le=le, description=description)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, _text("packaged name (smollm2), GGUF file, or directory of safetensors")] = "smollm2"
    served_name: Annotated[str | None, _text("name clients use; default: the model's own")] = None
    tokenizer: Annotated[str | None, _text("directory with tokenizer.json; default: the model's own")] = None
    chat_template: Annotated[str | None, _text("file with a Jinja chat template; default: the model's own")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], _text("type of dense weights; auto keeps the stored one")
    ] = "auto"
    quantize: Annotated[
        Literal["q8_0", "q4_0", "int8", "fp8", "q4_k"] | None,
        _text(
            "quantize dense weights while loading (int8: a scale per output, inputs quantized per token; a GPU has int8, fp8 and "
            "q4_k, a CPU int8, q8_0 and q4_0); default: as dtype says"
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"], _text("dummy: random weights instead of the files', to measure speed without them")
    ] = "auto"
    max_len: (
        Annotated[int, _count("longest prompt plus output, tokens; default: the model's, if it fits", 1)] | None
    ) = None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    kv_memory: Annotated[
        str | None, _text("bytes for KV blocks per worker (512MiB, 4GiB); default: from free memory")
    ] = None
    gpu_memory: Annotated[
        float, Meta(gt=0, le=1, description="fraction of a GPU's memory that a worker may use, weights included")
    ] = 0.9
    kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int16", "int8", "fp8"],
        _text("type of stored keys and values; integers (CPU) have a scale per token and head, fp8 (GPU) has none"),
    ] = "auto"
    block_size: Annotated[int, _count("tokens per KV block", 1, le=256)] = 16
    prefix_cache: Annotated[bool, _text("reuse the KV of equal prompt prefixes")] = True
    share_prefixes: Annotated[
        bool,
        _text(
            "let callers with different API keys reuse each other's prefixes; timing and cached_tokens then reveal to one "
            "what another asked"
        ),
    ] = False
    num_blocks: Annotated[int, _count("KV blocks per engine; overrides kv-memory (tests)", 1)] | None = None


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    dp: Annotated[int, _count("engines (data parallel)", 1, le=1024)] = 1
    tp: Annotated[int, _count("workers that share each layer (tensor parallel)", 1, le=64)] = 1
    pp: Annotated[int, _count("pipeline stages", 1, le=64)] = 1
    ep: Annotated[
        bool,
        _text(
            "expert parallel: split a model's experts over the engines (dp), which then run in lockstep and restart together"
        ),
    ] = False
    sequence_parallel: Annotated[
        bool,
        _text(
            "on GPUs, split the hidden states of long prompts over the workers of tp between layers (sequence parallel)"
        ),
    ] = False
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        _text("device; auto: an NVIDIA GPU if there is one that supports the model, else the CPU"),
    ] = "auto"
    share_gpus: Annotated[
        bool, _text("let workers share GPUs when there are fewer GPUs than workers (tests, small models)")
    ] = False
    graph_sizes: Annotated[
        str,
        _text(
            "batch sizes of decode steps that a GPU captures as CUDA graphs (1,8,32), none, or auto: a few, more as needed"
        ),
    ] = "auto"
    threads: Annotated[int, _count("CPU threads per worker; default: cores / workers", 1)] | None = None
    pin_cores: Annotated[
        Literal["auto", "on", "off"], _text("pin each CPU thread to a core; auto: when a few cores are left over")
    ] = "auto"
    executor: Annotated[
        Literal["auto", "inproc", "procs"], _text("where workers run; auto: inside the engine when it has one worker")
    ] = "auto"
    worker: Annotated[
        Literal["torch", "fake"], _text("worker kind; fake computes hashes instead of a model (tests)")
    ] = "torch"

    @property
    def worker_kind(self) -> Literal["torch", "cuda", "fake"]:
        """Which worker kind runs the steps; a device not chosen yet counts as the CPU."""
        return "cuda" if self.worker == "torch" and self.device == "cuda" else self.worker


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: (
        Annotated[int, _count("maximum sequences in one step; default: 64, and 256 on a GPU", 1, le=8192)] | None
    ) = None
    max_num_tokens: (
        Annotated[
            int, _count("token budget of one step; default: 256, and 16384 on a GPU, at least 2 x max-num-seqs", 1)
        ]
        | None
    ) = None
    chunk: (
        Annotated[
            int,
            _count(
                "maximum prompt tokens of one sequence per step; 0: prompts are not chunked; default: the token budget",
                0,
            ),
        ]
        | None
    ) = None
    itl_target: Annotated[
        str,
        _text(
            "time between tokens of a stream while prompts of others are computed (50ms), kept by cutting prompts; ~50ms is "
            "widened while many wait for a first token. Service tiers may have their own (50ms,priority=25ms,flex=off). auto: one "
            "with ~, as the machine allows; off: prompts fill steps"
        ),
    ] = "auto"
    ttft_target: Annotated[
        str,
        _text(
            "time to the first token (1s): prompts that wait longer get more of each step than itl-target leaves them; when both "
            "are missed, requests are refused; off: none"
        ),
    ] = "off"
    max_waiting: Annotated[int, _count("maximum queued sequences; default: 4 x max-num-seqs", 1)] | None = None
    max_waiting_tokens: (
        Annotated[
            int,
            _count(
                "maximum queued prompt tokens; default: 8 x the larger of max-num-tokens and max-len, at least 16384", 1
            ),
        ]
        | None
    ) = None
    policy: Annotated[
        str,
        _text(
            "scheduling order: fcfs, priority (smaller first), deadline (earliest first), fair (equal shares of clients), feedback "
            "(short answers first), or a plug-in's name"
        ),
    ] = "fcfs"
    aging: Annotated[float, Meta(gt=0, description="seconds of waiting that outweigh one level of priority")] = 10.0
    queue_timeout: Annotated[float, Meta(ge=0, description="seconds a request may wait in the queue; 0: no limit")] = (
        60.0
    )
    max_wait: Annotated[
        float,
        Meta(
            ge=0,
            description="longest predicted wait in the queue, seconds; a request that would wait longer is refused at once; 0: any",
        ),
    ] = 15.0
    async_steps: Annotated[
        bool, _text("plan a step while the previous one runs (without pipeline stages only: pp 1)")
    ] = True
    check: Annotated[bool, _text("check all invariants after every event (tests; slow)")] = False

    @property
    def num_rows(self) -> int:
        """max_num_seqs, or the CPU default while it is unresolved."""
        return self.max_num_seqs or CPU_ROWS

    @property
    def num_tokens(self) -> int:
        """max_num_tokens, or the CPU default while it is unresolved."""
        return self.max_num_tokens or max(CPU_TOKENS, 2 * self.num_rows)

    def queue_tokens(self, max_len: int) -> int:
        """max_waiting_tokens, or its default when the longest request has `max_len` tokens."""
        return self.max_waiting_tokens or max(LEAST_QUEUE, 8 * max(self.num_tokens, max_len))


class ServingConfig(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, _text("address to listen on; :: is every interface, IPv6 and IPv4")] = "127.0.0.1"
    port: Annotated[int, _count("TCP port; 0 picks a free one", 0, le=65535)] = 8000
    api_servers: Annotated[int, _count("HTTP processes", 1, le=256)] = 1
    api_key: Annotated[
        tuple[str, ...],
        _text(
            "key that clients must send; may be given several times. Other users can read a command line: prefer --api-key-file"
        ),
    ] = ()
    api_key_file: Annotated[
        str | None, _text("file of keys that clients must send, one per line, in addition to those given")
    ] = None
    admin_key: Annotated[
        tuple[str, ...],
        _text("key for endpoints that change the server itself (/sleep, /wake_up, /pause, /resume); default: disabled"),
    ] = ()
    admin_key_file: Annotated[str | None, _text("file of admin keys, one per line, in addition to those given")] = None
    cors_origins: Annotated[
        tuple[str, ...],
        _text(
            "web pages that may use this server: origins (https://app.example,http://localhost:3000), or *; default: none"
        ),
    ] = ()
    quotas: Annotated[
        str | None, _text("YAML file of clients: key, requests_per_minute, tokens_per_minute, priority for each")
    ] = None
    requests_per_minute: Annotated[
        int, _count("requests per minute of one caller (key, or address without keys); 0: no limit", 0)
    ] = 0
    tokens_per_minute: Annotated[int, _count("prompt and output tokens per minute of one caller; 0: no limit", 0)] = 0
    target_wait: Annotated[
        float,
        Meta(
            ge=0, description="target wait in the queue, seconds; above it fewer requests are admitted; 0: all that fit"
        ),
    ] = 0.0
    request_timeout: Annotated[
        float, Meta(ge=0, description="total seconds a request may take; a request may ask for less; 0: no limit")
    ] = 0.0
    body_limit: Annotated[int, _count("largest request body, bytes", 1024)] = 8 << 20
    default_max_tokens: (
        Annotated[
            int,
            _count(
                "completion length when a request names none; default: all that fits, and 16 for /v1/completions", 1
            ),
        ]
        | None
    ) = None
    drain_notice: Annotated[
        float, Meta(ge=0, description="seconds after SIGTERM during which new requests are still taken")
    ] = 5.0
    drain_timeout: Annotated[
        float, Meta(ge=0, description="seconds running streams may take to finish after SIGTERM")
    ] = 60.0
    migration_limit: Annotated[
        int,
        _count(
            "times a choice may be resumed on another engine after its engine died; 0: it ends with an error", 0, le=100
        ),
    ] = 2
    engine_wait: Annotated[
        float, Meta(ge=0, description="seconds a request waits for an engine to restart while none is up")
    ] = 60.0
    stream_buffer: Annotated[
        int, _count("bytes that a slow client may lag behind before its stream is ended", 4096)
    ] = 256 << 10

    def __repr__(self) -> str:
        """Like any Struct's, without the keys: it ends up in logs and notebooks."""
        hidden = ("api_key", "admin_key")
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return f"ServingConfig({', '.join(f'{k}={v!r}' for k, v in values if not (v and k in hidden))})"


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True):
    balance: Annotated[
        Literal["p2c", "least", "round_robin", "random", "prefix", "prefix_least"],
        _text(
            "how an engine is chosen when dp > 1: the cheaper of two random ones, the cheapest, each in turn, a random one; with "
            "prefix, one of the two has cached most of the prompt; prefix_least counts cached tokens in the cost"
        ),
    ] = "p2c"
    load_balancing: Annotated[
        Literal["internal", "hybrid", "external"],
        _text(
            "who balances: each HTTP process over all engines (internal), or an external balancer over HTTP processes on ports of "
            "their own (--port and the following), each with its share of the engines (hybrid) or with one (external)"
        ),
    ] = "internal"
    work_stealing: Annotated[bool, _text("move requests that wait at one engine to another with room")] = True
    engine_weights: Annotated[
        tuple[str, ...],
        _text("relative capacity of each engine (2,1,1); a larger one gets more requests; default: all equal"),
    ] = ()
    engine_labels: Annotated[
        tuple[str, ...],
        _text("zone of each engine (rack-a,rack-a,rack-b); requests prefer their own zone; default: one zone"),
    ] = ()
    front_labels: Annotated[
        tuple[str, ...],
        _text("zone of each HTTP process; a request may name another in X-Trireme-Label; default: none"),
    ] = ()


LEAST_COLLECTIVE_S = 600.0


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True):
    transport: Annotated[Literal["ipc", "tcp"], _text("sockets between processes; tcp uses CURVE keys")] = "ipc"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _text("minimum log level")] = "info"
    log_format: Annotated[Literal["text", "json"], _text("format of log lines")] = "text"
    start_timeout: Annotated[float, Meta(gt=0, description="seconds a part may take to start")] = 600.0
    step_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds after which a step that takes three times as long as similar ones ends its engine, which restarts",
        ),
    ] = 15.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one deployment. `trireme.resolve` turns a requested one into a resolved one, with Decisions."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    parallel: ParallelConfig = ParallelConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    serving: ServingConfig = ServingConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def routes_by_prefix(self) -> bool:
        """Whether engines report their cached prefixes to the coordinator, and frontends send it the keys of each prompt's first
        blocks."""
        has_choice = self.parallel.dp > 1 and self.cache.prefix_cache
        return has_choice and self.coordinator.balance in ("prefix", "prefix_least")

    @property
    def in_lockstep(self) -> bool:
        """Whether engines share a collective, so that none may step without the others."""
        return self.parallel.ep and self.parallel.dp > 1

    @property
    def collective_timeout(self) -> float:
        """Seconds after which a collective of CPU ranks times out by itself. Long, because it cannot tell a stuck rank from one
        without a processor: the engine can (engine_core/stall.py) and ends its workers, and deaths and aborts are noticed at
        once."""
        return max(LEAST_COLLECTIVE_S, 10.0 * self.launch.step_timeout)

    @property
    def runs_ahead(self) -> bool:
        """Whether workers keep the tokens they sample and use them in steps planned before anybody else knows them. False with
        pipeline stages: the first stage does not see what the last one samples."""
        return self.scheduler.async_steps and self.parallel.pp == 1


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """One resolved setting and its reason, for the ready panel and `--print-config`."""

    what: str
    value: str
    because: str
