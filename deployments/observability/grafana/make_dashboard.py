"""
Writes the dashboard ``dashboards/virnucpro.json`` from the panels below, by Grafana's own types.

    python deployments/observability/grafana/make_dashboard.py

A panel is one call: its width, its title, its unit and its queries; its place in the grid follows from the order. A
test checks that the file is what this script makes. What the metrics mean: ``docs/metrics.md``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    gauge,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as values
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE = Path(__file__).parent / "dashboards" / "virnucpro.json"
UID = "virnucpro-run"
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")

# What a query is about. One run at a time, always: `host`, `device` and `model` are not unique to it.
RUN = 'run_id="$run_id"'
MODEL = f'{RUN}, model=~"$model"'
RANK = f'{MODEL}, host=~"$host", device=~"$device"'
GPU = f'{RUN}, host=~"$host", device=~"$device"'
# Stages of the whole run have no model.
STAGE = f'{RUN}, model=~"$model|"'

# Grafana scales these: 12,300 tok/s is shown as 12.3 ktok/s.
SEQUENCES_PER_SECOND = "si:seq/s"
TOKENS_PER_SECOND = "si:tok/s"
TOKENS = "si:tok"
CONTIGS_PER_SECOND = "si:contigs/s"
NUCLEOTIDES, NUCLEOTIDES_PER_SECOND = "si:nt", "si:nt/s"
CORES = "suffix:cores"
COUNT = "locale"

GREEN, ORANGE, RED, GREY = "green", "orange", "red", "transparent"


def query(expr: str, legend: str = "") -> prometheus.Dataquery:
    """Return a query over the dashboard's time range."""
    return prometheus.Dataquery().expr(expr).legend_format(legend or "__auto").range()


def now(expr: str, legend: str = "") -> prometheus.Dataquery:
    """Return a query of the end of the dashboard's time range alone."""
    return prometheus.Dataquery().expr(expr).legend_format(legend or "__auto").instant()


def last(selector: str) -> str:
    """Return *selector*'s last values in the time range, so that a run that has ended still shows how it ended."""
    return f"last_over_time({selector}[$__range])"


def in_all(counter: str) -> str:
    """Return *counter*'s last values, summed over the ranks: one that moved to another host counts once."""
    return f"sum by (model) (max by (model, rank) ({last(f'{counter}{{{MODEL}}}')}))"


def steps(first: str, *others: tuple[float, str]) -> dashboard.ThresholdsConfig:
    """Return colours: *first* below all, then each from its value on."""
    colours = [
        model.Threshold(value=None, color=first),
        *(model.Threshold(value=at, color=name) for at, name in others),
    ]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(colours)


def names(texts: Mapping[int, tuple[str, str]]) -> list[model.ValueMapping]:
    """Return how values are shown: value -> text and colour."""
    return [
        model.ValueMap(options={str(at): model.ValueMappingResult(text=t, color=c) for at, (t, c) in texts.items()})
    ]


def last_value() -> common.ReduceDataOptions:
    """Show each series' last value."""
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def panel(
    kind: Any, width: int, height: int, title: str, unit: str, *queries: prometheus.Dataquery, about: str = ""
) -> Any:
    """Return a panel of *kind*, a module of builders, *width* of 24 columns wide."""
    built = kind.Panel().title(title).unit(unit).datasource(SOURCE).span(width).height(height).no_value("no data")
    for letter, asked in zip("ABCD", queries, strict=False):
        built.with_target(asked.ref_id(letter).datasource(SOURCE))
    return built.description(about) if about else built


def lines(width: int, title: str, unit: str, *queries: prometheus.Dataquery, about: str = "") -> timeseries.Panel:
    """Return curves over time from 0 up, a legend with last and mean below."""
    legend = common.VizLegendOptions().display_mode(values.LegendDisplayMode.TABLE).show_legend(True)
    tooltip = common.VizTooltipOptions().mode(values.TooltipDisplayMode.MULTI).sort(values.SortOrder.DESCENDING)
    return (
        panel(timeseries, width, 8, title, unit, *queries, about=about)
        .min(0)
        .line_width(1)
        .fill_opacity(8)
        .show_points(values.VisibilityMode.NEVER)
        .legend(legend.placement(values.LegendPlacement.BOTTOM).calcs(["lastNotNull", "mean"]))
        .tooltip(tooltip)
    )


def figure(width: int, title: str, unit: str, *queries: prometheus.Dataquery, about: str = "") -> stat.Panel:
    """Return one large figure a series, without a curve."""
    return (
        panel(stat, width, 4, title, unit, *queries, about=about)
        .graph_mode(values.BigValueGraphMode.NONE)
        .reduce_options(last_value())
        .thresholds(steps(GREEN))
    )


def states(
    width: int, title: str, asked: prometheus.Dataquery, texts: Mapping[int, tuple[str, str]], about: str
) -> statetimeline.Panel:
    """Return a lane a series, coloured by what it is at each time."""
    return (
        panel(statetimeline, width, 8, title, "none", asked, about=about)
        .mappings(names(texts))
        .show_value(values.VisibilityMode.NEVER)
        .merge_values(True)
        .row_height(0.8)
        .fill_opacity(80)
        .line_width(0)
        .legend(common.VizLegendOptions().display_mode(values.LegendDisplayMode.LIST).show_legend(True))
    )


def bars(width: int, title: str, unit: str, *queries: prometheus.Dataquery, about: str = "") -> bargauge.Panel:
    """Return a horizontal bar a series."""
    return (
        panel(bargauge, width, 8, title, unit, *queries, about=about)
        .orientation(values.VizOrientation.HORIZONTAL)
        .display_mode(values.BarGaugeDisplayMode.BASIC)
        .reduce_options(last_value())
        .min(0)
        .thresholds(steps("blue"))
    )


def rows(asked: prometheus.Dataquery, width: int, title: str, hidden: tuple[str, ...], about: str) -> table.Panel:
    """Return a table of the series' labels."""
    hide = dict.fromkeys(("Time", "Value", "__name__", "instance", "job", *hidden), True)
    return panel(table, width, 5, title, "none", asked.format(PromQueryFormat.TABLE), about=about).with_transformation(
        model.DataTransformerConfig(id_val="organize", options={"excludeByName": hide, "indexByName": {}})
    )


def overview() -> Iterator[Any]:
    """The summary: is it running, progress, time left, versions."""
    yield (
        figure(3, "Stage", "none", now(f"virnucpro_stage_running{{{RUN}}} == 1", "{{stage}} {{model}}"))
        .text_mode(values.BigValueTextMode.NAME)
        .description("What the run does now. Nothing: it has ended, or its metrics cannot be read.")
        .no_value("not running")
    )
    yield (
        panel(gauge, 3, 4, "Progress", "percentunit", now(last(f"virnucpro_progress_ratio{{{MODEL}}}"), "{{model}}"))
        .min(0)
        .max(1)
        .decimals(1)
        .reduce_options(last_value())
        .thresholds(steps("blue"))
        .description(
            "Share of the plan's tokens, or of the nucleotides of contigs, that is done. Not of sequences: the long "
            "ones come first."
        )
    )
    yield figure(
        3,
        "Time left",
        "dtdurations",
        now(f"virnucpro_estimated_seconds_left{{{MODEL}}}", "{{model}}"),
        about="Until the slowest worker has computed its share of tokens, at the rate of the last minute.",
    ).no_value("no estimate")
    yield figure(
        3,
        "Done at",
        "dateTimeAsIsoNoDateIfToday",
        now(f"(time() + (virnucpro_estimated_seconds_left{{{MODEL}}} > 0)) * 1000", "{{model}}"),
        about="When the embedding will be computed; what follows it (joining, classifying) is not estimated.",
    ).no_value("no estimate")
    yield figure(
        3,
        "Speed",
        TOKENS_PER_SECOND,
        now(f"sum by (model) (rate(virnucpro_tokens_total{{{MODEL}}}[$__rate_interval]))", "{{model}}"),
        about="Tokens computed per second, on all devices together.",
    ).no_value("not running")
    yield figure(
        3,
        "Rows, contigs",
        COUNT,
        now(in_all("virnucpro_sequences_total"), "{{model}}"),
        now(in_all("virnucpro_contigs_total"), "{{model}}"),
        about="Rows and contigs that are durable, those of earlier starts, copies and rows from the cache included.",
    )
    yield figure(
        3,
        "Workers",
        COUNT,
        now(f"count(virnucpro_worker_up{{{MODEL}}} == 1)", "up"),
        now(f"count(virnucpro_worker_up{{{MODEL}}} == 0)", "down"),
        about="Workers with a process, and those that failed or were lost; done ones are in neither figure.",
    ).override_by_name("down", [model.DynamicConfigValue("thresholds", steps(RED).build())])
    yield (
        figure(
            3,
            "Without a row",
            COUNT,
            now(f"sum({last(f'virnucpro_failed_sequences_total{{{MODEL}}}')})", "failed"),
            now(f"sum({last(f'virnucpro_quarantined_sequences_total{{{MODEL}}}')})", "quarantined"),
            about="Sequences that got no row; the row Failures says why.",
        )
        .no_value("none")
        .thresholds(steps(ORANGE))
    )
    run_info = last(f"virnucpro_run_info{{{MODEL}}}")
    build_info = f"max by (run_id, version, torch, python) ({last(f'virnucpro_build_info{{{RUN}}}')})"
    yield rows(
        now(f"{run_info} * on (run_id) group_left (version, torch, python) {build_info}"),
        16,
        "Run",
        ("exported_run_id",),
        "What is computed, and with which versions.",
    )
    yield (
        rows(
            now('ALERTS{alertname=~"Virnucpro.*", run_id=~"$run_id|"}'),
            8,
            "Alerts",
            ("run_id", "rank", "model"),
            "Alerts of this run, of the Prefect server and of hosts, that are pending or firing.",
        ).no_value("none")
    )


def of_server() -> Iterator[Any]:
    """All runs of the Prefect server, by what its exporter counts."""
    for title, expr, colour, about in (
        ("Queued", 'sum(virnucpro_flow_runs{state=~"scheduled|late|retrying|pending"})', GREEN, "Due, not running."),
        ("Running", 'sum(virnucpro_flow_runs{state="running"})', GREEN, "Runs under way, in all work pools."),
        ("Late", 'sum(virnucpro_flow_runs{state="late"})', ORANGE, "Those of the queued that Prefect calls late."),
        ("Crashed", 'sum(virnucpro_flow_runs_ended_1h{state="crashed"})', RED, "Within the last hour."),
        ("Retried", "sum(virnucpro_flow_runs_retried_1h)", ORANGE, "Started more than once, within the last hour."),
    ):
        yield figure(4, title, COUNT, now(expr), about=about).thresholds(steps(GREEN, (1, colour)))
    yield (
        figure(4, "Workers online", COUNT, now("sum(virnucpro_prefect_workers)"), about="Of all work pools.")
        .no_value("no Prefect")
        .thresholds(steps(RED, (1, GREEN)))
    )
    yield lines(
        8,
        "Runs by state",
        COUNT,
        query("sum by (state) (virnucpro_flow_runs)", "{{state}}"),
        about="Runs that are due and have not ended, of all queues.",
    )
    yield lines(
        8,
        "Longest wait, by queue",
        "s",
        query(
            'max by (pool, queue) (virnucpro_flow_run_longest_seconds{state=~"scheduled|late|retrying"})',
            "{{pool}} {{queue}}",
        ),
        about="Seconds since the run that waits longest was due.",
    )
    yield states(
        8,
        "Queues with a worker",
        query("max by (pool, queue) (virnucpro_queue_has_worker)", "{{pool}} {{queue}}"),
        {0: ("no worker", RED), 1: ("worker", GREEN)},
        "Whether a worker has asked for the queue's runs within a minute.",
    )
    yield lines(
        12,
        "Ended within an hour",
        COUNT,
        query("sum by (state) (virnucpro_flow_runs_ended_1h)", "{{state}}"),
        about="Runs of all queues that ended in the hour before.",
    )
    yield (
        lines(
            12,
            "Prefect server",
            CORES,
            query('rate(process_cpu_seconds_total{job="prefect"}[$__rate_interval])', "cores"),
            query('process_resident_memory_bytes{job="prefect"}', "resident memory"),
            about="Left: cores that its process keeps busy. Right: bytes of its memory.",
        )
        .axis_placement(values.AxisPlacement.LEFT)
        .override_by_query(
            "B",
            [
                model.DynamicConfigValue("unit", "bytes"),
                model.DynamicConfigValue("custom.axisPlacement", "right"),
            ],
        )
    )


def throughput() -> Iterator[Any]:
    """How fast each device is."""
    yield lines(
        12,
        "Sequences per second",
        SEQUENCES_PER_SECOND,
        query(
            f"sum by (host, device) (rate(virnucpro_sequences_total{{{RANK}}}[$__rate_interval]))",
            "{{host}} {{device}}",
        ),
        about=(
            "Counted when their rows are durable, about once a minute, so over at least two minutes. It rises to "
            "the end: the short sequences come last."
        ),
    ).interval("2m")
    yield lines(
        12,
        "Tokens per second",
        TOKENS_PER_SECOND,
        query(
            f"sum by (host, device) (rate(virnucpro_tokens_total{{{RANK}}}[$__rate_interval]))", "{{host}} {{device}}"
        ),
        about="The figure to compare devices and runs by.",
    )
    yield lines(
        12,
        "Contigs per second, by worker",
        CONTIGS_PER_SECOND,
        query(
            f"sum by (rank, host, model) (rate(virnucpro_contigs_total{{{RANK}}}[$__rate_interval]))",
            "{{rank}} {{host}} {{model}}",
        ),
        about="Contigs scored by composition, or searched for genes; counted when what was found is durable.",
    )
    yield lines(
        12,
        "Nucleotides per second, by worker",
        NUCLEOTIDES_PER_SECOND,
        query(
            f"sum by (rank, host, model) (rate(virnucpro_nucleotides_total{{{RANK}}}[$__rate_interval]))",
            "{{rank}} {{host}} {{model}}",
        ),
        about="Of contigs. It falls once ambiguous ones are compared with known proteins, which takes longer.",
    )


def utilization() -> Iterator[Any]:
    """Utilisation against throughput, for each device."""
    busy = [("unit", "percentunit"), ("max", 1), ("custom.axisPlacement", "left"), ("custom.fillOpacity", 20)]
    yield (
        lines(
            24,
            "$device",
            TOKENS_PER_SECOND,
            query(f"avg by (host, device) (virnucpro_gpu_utilization_ratio{{{GPU}}})", "{{host}} utilisation"),
            query(
                f"sum by (host, device) (rate(virnucpro_tokens_total{{{RANK}}}[$__rate_interval]))", "{{host}} tokens/s"
            ),
            about=(
                "Left: share of time in which the GPU computed. Right: tokens per second. Low and low: the GPU waits "
                "for its input. High and falling: it is slowed down (see Throttling) or shared with other programs."
            ),
        )
        .axis_placement(values.AxisPlacement.RIGHT)
        .override_by_query("A", [model.DynamicConfigValue(name, value) for name, value in busy])
        .repeat("device")
        .repeat_direction("h")
        .max_per_row(4)
    )


def progress() -> Iterator[Any]:
    """When it will be done, and which worker will be last."""
    yield lines(
        6,
        "Estimated time left",
        "s",
        query(f"virnucpro_estimated_seconds_left{{{MODEL}}}", "{{model}}"),
        about="A straight line down at one second a second is a good estimate.",
    )
    yield lines(
        6,
        "Tokens left, by worker",
        TOKENS,
        query(f"virnucpro_worker_tokens_left{{{RANK}}}", "{{rank}} {{host}} {{device}} {{model}}"),
        about="Lines that run together end together. One that stays up is a worker that is slower, or stuck.",
    )
    yield lines(
        6,
        "Nucleotides left, by worker",
        NUCLEOTIDES,
        query(f"virnucpro_worker_nucleotides_left{{{RANK}}}", "{{rank}} {{host}} {{model}}"),
        about="Of contigs. It rises once, when it is known which are compared with known proteins.",
    )
    yield lines(
        6,
        "Since the last progress, by worker",
        "s",
        query(
            f"time() - virnucpro_last_progress_timestamp_seconds{{{RANK}}} and virnucpro_worker_up{{{RANK}}}",
            "{{rank}} {{host}} {{device}} {{model}}",
        ),
        about="Seconds since a worker last finished a batch or made rows durable; without workers that are done.",
    )


def batches() -> Iterator[Any]:
    """Batches: their size and duration."""
    buckets = f"sum by (le) (rate(virnucpro_batch_duration_seconds_bucket{{{RANK}}}[$__rate_interval]))"
    yield lines(
        8,
        "Batch duration",
        "s",
        *(query(f"histogram_quantile({share}, {buckets})", f"{share:.0%}") for share in (0.5, 0.9, 0.99)),
        about="Half, nine tenths and 99 of 100 batches took less than this.",
    )
    yield (
        panel(
            heatmap,
            8,
            8,
            "Batch durations",
            "short",
            query(
                f"sum by (le) (increase(virnucpro_batch_duration_seconds_bucket{{{RANK}}}[$__rate_interval]))", "{{le}}"
            ).format(PromQueryFormat.HEATMAP),
            about="Batches by how long they took. Two bands are two kinds of device, or two models.",
        )
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(HeatmapColorMode.SCHEME)
            .scheme("Blues")
            .fill("dark-blue")
            .exponent(0.5)
            .steps(64)
        )
        .hide_legend()
    )
    yield (
        lines(
            8,
            "Packing efficiency",
            "percentunit",
            query(f"virnucpro_packing_efficiency_ratio{{{RANK}}}", "{{rank}} {{host}} {{device}} {{model}}"),
            about="Real tokens over token budget, over all batches so far: the rest to 100 % is not computed.",
        ).max(1)
    )


def failures() -> Iterator[Any]:
    """Failures and skipped records."""
    yield lines(
        6,
        "Sequences without a row",
        COUNT,
        query(
            f"sum by (model, reason) (virnucpro_failed_sequences_total{{{MODEL}}})", "failed: {{reason}} ({{model}})"
        ),
        query(
            f"sum by (model, reason) (virnucpro_quarantined_sequences_total{{{MODEL}}})",
            "quarantined: {{reason}} ({{model}})",
        ),
        about="They are in failed_sequences.tsv. Quarantined: computing them ended workers' processes.",
    ).no_value("none")
    yield lines(
        6,
        "Worker restarts",
        COUNT,
        query(
            f"sum by (host, device, failure) (virnucpro_worker_restarts_total{{{RANK}}})",
            "{{host}} {{device}}: {{failure}}",
        ),
        about="Restarted processes, by the failure before. No sequence is counted or computed twice for it.",
    ).no_value("none")
    yield lines(
        6,
        "Splits for want of memory",
        COUNT,
        query(f"sum by (host, device) (virnucpro_oom_splits_total{{{RANK}}})", "{{host}} {{device}}"),
        about="Batches computed in halves because the device was out of memory. Many: use a smaller --token-budget.",
    )
    yield bars(
        6,
        "Records not computed",
        COUNT,
        now(in_all("virnucpro_cache_hits_total"), "from the cache ({{model}})"),
        now(last(f"virnucpro_deduplicated_sequences_total{{{MODEL}}}"), "copies ({{model}})"),
        now(last(f"virnucpro_skipped_records_total{{{MODEL}}}"), "skipped ({{model}})"),
        about="Rows taken from the embedding cache, records identical to another one, records that break a rule.",
    )


def gpus(metrics: str = "virnucpro_gpu", chosen: str = GPU, of: str = "GPU") -> Iterator[Any]:
    """The GPUs of the run, or other *metrics* of GPUs; no data without an NVIDIA driver."""
    legend = "{{host}} {{device}}"
    yield lines(8, f"{of} utilisation", "percentunit", query(f"{metrics}_utilization_ratio{{{chosen}}}", legend)).max(1)
    yield lines(
        8,
        f"{of} memory",
        "bytes",
        query(f"{metrics}_memory_used_bytes{{{chosen}}}", f"{legend} used"),
        query(f"{metrics}_memory_total_bytes{{{chosen}}}", f"{legend} total"),
        about="Of all programs on the GPU.",
    )
    yield lines(8, "Power", "watt", query(f"{metrics}_power_watts{{{chosen}}}", legend))
    yield (
        lines(8, "Temperature", "celsius", query(f"{metrics}_temperature_celsius{{{chosen}}}", legend))
        .thresholds(steps(GREEN, (80, ORANGE), (90, RED)))
        .thresholds_style(common.GraphThresholdsStyleConfig().mode(values.GraphThresholdsStyleMode.DASHED))
    )
    yield lines(8, "Multiprocessor clock", "hertz", query(f"{metrics}_sm_clock_hertz{{{chosen}}}", legend))
    seen = f"max by (host, device, reason) (max_over_time({metrics}_throttled{{{chosen}}}[$__range])) > 0"
    yield states(
        8,
        "Throttling",
        query(
            f"max by (host, device, reason) ({metrics}_throttled{{{chosen}}}) and on (host, device, reason) ({seen})",
            f"{legend} {{{{reason}}}}",
        ),
        {0: ("no", GREY), 1: ("slowed down", ORANGE)},
        "Why a GPU runs below its full clock; only reasons seen in this time range.",
    ).no_value("none")


def of_hosts() -> Iterator[Any]:
    """All GPUs of the hosts that have an exporter, whether or not a run is there."""
    yield (
        states(
            24,
            "GPUs that do not answer",
            query("virnucpro_host_gpu_lost", "{{host}} {{device}}"),
            {0: ("answers", GREEN), 1: ("lost", RED)},
            "Every GPU that the hosts' exporters have seen. Red: it is lost, or its driver hangs.",
        ).no_value("no exporter, or no NVIDIA driver")
    )
    yield from gpus("virnucpro_host_gpu", "", "Host GPU")


def stages() -> Iterator[Any]:
    """Seconds of each stage; a prediction has some fifteen."""
    yield states(
        12,
        "Stages",
        query(f"virnucpro_stage_running{{{STAGE}}}", "{{stage}} {{model}}"),
        {0: ("ended", GREY), 1: ("running", "blue")},
        "When each stage ran.",
    ).height(12)
    yield bars(
        6, "Stage duration", "s", now(last(f"virnucpro_stage_duration_seconds{{{STAGE}}}"), "{{stage}} {{model}}")
    ).height(12)
    yield bars(
        6,
        "Loading the model",
        "s",
        now(last(f"virnucpro_model_load_seconds{{{RANK}}}"), "{{rank}} {{host}} {{device}} {{model}}"),
        about="Seconds that each worker's last process took to load its model.",
    ).height(12)


def workers() -> Iterator[Any]:
    """The processes."""
    yield states(
        8,
        "Workers",
        query(f"virnucpro_worker_up{{{RANK}}}", "{{rank}} {{host}} {{device}} {{model}}"),
        {0: ("down", RED), 1: ("up", GREEN)},
        "Red: it failed or was lost. Nothing: it needs no process, as it is done or has not begun.",
    )
    yield lines(
        8,
        "Processor",
        CORES,
        query(
            "sum by (rank, host, device, model) "
            f"(rate(virnucpro_worker_cpu_seconds_total{{{RANK}}}[$__rate_interval]))",
            "{{rank}} {{host}} {{device}} {{model}}",
        ),
        query(f"sum by (stage) (rate(virnucpro_stage_cpu_seconds_total{{{RUN}}}[$__rate_interval]))", "run: {{stage}}"),
        query(f"sum by (rank) (rate(virnucpro_worker_gpu_seconds_total{{{RUN}}}[$__rate_interval]))", "GPU {{rank}}"),
        about="Cores that each worker and the run's own process keep busy, and the share of a GPU that a worker holds. "
        "Above one with an idle GPU: preparing the input is too slow.",
    )
    yield lines(
        8,
        "Resident memory",
        "bytes",
        query(f"virnucpro_worker_resident_memory_bytes{{{RANK}}}", "{{rank}} {{host}} {{device}} {{model}}"),
        query(f"virnucpro_peak_memory_bytes{{{RUN}}}", "most: {{rank}} {{host}} {{stage}}"),
        query(f"virnucpro_peak_gpu_memory_bytes{{{RUN}}}", "most, GPU: {{rank}} {{host}} {{stage}}"),
        about="Of the host, for each worker's process; most so far, also of the run's own, without a rank.",
    )


def disk() -> Iterator[Any]:
    """The file system of the output."""
    yield lines(
        12,
        "Disk",
        "bytes",
        query(f"virnucpro_disk_free_bytes{{{RUN}}}", "free"),
        query(f"virnucpro_disk_size_bytes{{{RUN}}}", "size"),
        about="Of the file system of the output folder.",
    )
    yield lines(
        12,
        "Written by the workers",
        "Bps",
        query(
            f"sum by (host, device) (rate(virnucpro_written_bytes_total{{{RANK}}}[$__rate_interval]))",
            "{{host}} {{device}}",
        ),
    )


def variables() -> Iterator[Any]:
    """What is chosen at the top."""
    yield dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    yield (
        dashboard.QueryVariable("run_id")
        .label("Run")
        .description("Runs seen in this time range; those seen last come first.")
        .datasource(SOURCE)
        .query("query_result(sort_desc(max by (run_id) (max_over_time(timestamp(virnucpro_run_info)[$__range:1m]))))")
        .regex('/run_id="([^"]+)"/')
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.DISABLED)
    )
    for name, label, metric in (
        ("model", "Model", "virnucpro_run_info"),
        ("host", "Host", "virnucpro_batches_total"),
        ("device", "Device", "virnucpro_batches_total"),
    ):
        yield (
            dashboard.QueryVariable(name)
            .label(label)
            .datasource(SOURCE)
            .query(f"label_values({metric}{{{RUN}}}, {name})")
            .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(model.VariableSort.NATURAL_ASC)
            .multi(True)
            .include_all(True)
            .current(model.VariableOption(selected=True, text="All", value="$__all"))
        )


def make_dashboard() -> model.Dashboard:
    """Return the dashboard."""
    made = (
        dashboard.Dashboard("VirNucPro run")
        .uid(UID)
        .description("One run of VirNucPro: progress, throughput, time left, devices, failures.")
        .tags(["virnucpro"])
        .timezone("browser")
        .time("now-3h", "now")
        .refresh("30s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .variables(list(variables()))
    )
    number = 0
    for title, panels in (
        ("Run", overview()),
        ("Prefect: all runs of the server", of_server()),
        ("Throughput", throughput()),
        ("Utilisation against throughput", utilization()),
        ("Progress", progress()),
        ("Batches", batches()),
        ("Failures", failures()),
        ("GPUs", gpus()),
        ("Stages", stages()),
        ("Workers", workers()),
        ("Disk", disk()),
        ("GPUs of all hosts, with or without a run", of_hosts()),
    ):
        number += 1
        made.with_row(dashboard.Row(title).id(number))
        for each in panels:
            number += 1
            made.with_panel(each.id(number))
    # Read once more, so that the file has the defaults that Grafana adds.
    plugins.register_default_plugins()
    return model.Dashboard.from_json(json.loads(as_json(made.build())))


def as_json(made: model.Dashboard) -> str:
    """Return the text of the file."""
    return json.dumps(made, cls=JSONEncoder, indent=2) + "\n"


def main() -> None:
    """Write the file."""
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(as_json(make_dashboard()), encoding="utf-8")


if __name__ == "__main__":
    main()
