"""Dataflow: the graph that would be sent, translated by a dry run. Nothing is run and no network.

What is asserted is what the service goes by: names (an update in place finds state by them),
coders, state and timer specs, and what is inside the pickled DoFns.
"""

from __future__ import annotations

import base64
import bz2
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2 as api
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import TimestampedValue

from beam_ckpt import CheckpointStore, inspect, open_store
from beam_ckpt.errors import PipelineRefusedError
from beam_ckpt.testing.gcs import GcsBucket, gcs_bucket, gcs_server
from beam_ckpt.transforms import CheckpointedParDo, Checkpoints

__all__ = ["gcs_bucket", "gcs_server"]

SECRET = "ya29.a-secret-that-no-graph-may-hold"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "dataflow.md"
RUNNING_JOB = "2026-01-01_00_00_00-1"
FEW_GROUPS = {"key_groups": 4}
PARDO = "beam:transform:pardo:v1"
FLATTEN = "beam:transform:flatten:v1"
BAG = "beam:user_state:bag:v1"


class TotalsFn(beam.DoFn):
    TOTAL = ReadModifyWriteStateSpec("total", VarIntCoder())
    RECENT = BagStateSpec("recent", VarIntCoder())
    FLUSH = TimerSpec("flush", TimeDomain.WATERMARK)

    def process(
        self,
        element,
        total=beam.DoFn.StateParam(TOTAL),
        recent=beam.DoFn.StateParam(RECENT),
        flush=beam.DoFn.TimerParam(FLUSH),
    ):
        total.write((total.read() or 0) + element[1])
        recent.add(element[1])
        flush.set(500)
        yield element

    @on_timer(FLUSH)
    def on_flush(self, recent=beam.DoFn.StateParam(RECENT)):
        recent.clear()


class SecretOptions(PipelineOptions):
    @classmethod
    def _add_argparse_args(cls, parser):
        parser.add_argument("--a_jobs_api_key")


def events(pipeline: beam.Pipeline) -> Any:
    stamped = pipeline | beam.Create([("a", 1), ("b", 2)]) | "Stamp" >> beam.Map(stamp)
    return stamped | "Typed" >> beam.Map(same).with_output_types(tuple[str, int])


def stamp(element):
    return TimestampedValue(element, 7)


def same(element):
    return element


def one(pipeline: beam.Pipeline, store: Any, **settings: Any) -> None:
    totals = CheckpointedParDo(TotalsFn(), uid="totals", store=store, **FEW_GROUPS | settings)
    _ = events(pipeline) | "Totals" >> totals


def chain(pipeline: beam.Pipeline, store: Any, **settings: Any) -> None:
    with Checkpoints(pipeline, store, **FEW_GROUPS | settings) as ckpt:
        first = events(pipeline) | "First" >> ckpt.ParDo(TotalsFn(), uid="first")
        again = first | "Again" >> beam.Map(same).with_output_types(tuple[str, int])
        _ = again | "Second" >> ckpt.ParDo(TotalsFn(), uid="second")


PIPELINES = {"one": one, "chain": chain}
OPERATORS = {"one": {"totals": "Totals/Operator"}, "chain": {"first": "First", "second": "Second"}}
TOP = {"one": "Totals/", "chain": ""}


def translate(build: Callable[[beam.Pipeline], None], *options: str) -> tuple[api.Pipeline, Any]:
    """The pipeline as it would be sent to Dataflow, and the job it would be sent as."""
    pytest.importorskip("google.cloud.dataflow", reason="google-cloud-dataflow-client is needed")
    arguments = [
        "--runner=DataflowRunner",
        "--dry_run=True",
        "--no_auth",
        "--sdk_location=container",
        "--project=a-project",
        "--region=us-central1",
        "--temp_location=gs://a-bucket/temp",
        *options,
    ]
    # It would look for the bucket of the temporary files.
    validate = "apache_beam.options.pipeline_options.GoogleCloudOptions.validate"
    # An update asks the service for the job of that name.
    asks = "apache_beam.runners.dataflow.internal.apiclient.Job.job_id_for_name"
    with mock.patch(validate, lambda *_: []), mock.patch(asks, lambda *_: RUNNING_JOB):
        pipeline = beam.Pipeline(options=PipelineOptions(arguments))
        build(pipeline)
        result = pipeline.run()
    return pipeline.runner.proto_pipeline, result.job


@dataclass(frozen=True)
class Graph:
    """A translated pipeline."""

    proto: api.Pipeline

    @property
    def names(self) -> list[str]:
        found = [t.unique_name for t in self.proto.components.transforms.values()]
        return sorted(name for name in found if "AppliedPTransform" not in name)

    def named(self, name: str) -> api.PTransform:
        """The transform of that name, or the only one within it that is no composite."""
        transforms = self.proto.components.transforms.values()
        (found,) = (
            t
            for t in transforms
            if not t.subtransforms
            and (t.unique_name == name or t.unique_name.startswith(f"{name}/ParDo("))
        )
        return found

    def pardos(self) -> Iterator[tuple[str, api.ParDoPayload]]:
        for transform in self.proto.components.transforms.values():
            if transform.spec.urn == PARDO:
                payload = api.ParDoPayload.FromString(transform.spec.payload)
                yield transform.unique_name, payload

    def stateful(self) -> dict[str, api.ParDoPayload]:
        """By name without the last part, which is Beam's name for a ParDo with several outputs."""
        found = {n: p for n, p in self.pardos() if p.state_specs or p.timer_family_specs}
        return {name.partition("/ParDo(")[0]: payload for name, payload in found.items()}

    def coder(self, id: str) -> object:
        """A coder with its components in it, so that two graphs can be compared."""
        coder = self.proto.components.coders[id]
        components = [self.coder(part) for part in coder.component_coder_ids]
        return coder.spec.urn, coder.spec.payload, components

    def coders(self) -> dict[str, object]:
        """The coder of each PCollection, by the name of what makes it."""
        found = {}
        for transform in self.proto.components.transforms.values():
            if not transform.subtransforms:
                for tag, id in transform.outputs.items():
                    pcoll = self.proto.components.pcollections[id]
                    found[f"{transform.unique_name}.{tag}"] = self.coder(pcoll.coder_id)
        return found

    def specs(self) -> dict[str, object]:
        """What an update in place looks at of each stateful transform: ids, kinds and coders."""
        return {
            name: (
                {i: (s.protocol.urn, s.WhichOneof("spec"), self.element_coder(s))
                 for i, s in sorted(payload.state_specs.items())},
                {i: (t.time_domain, self.coder(t.timer_family_coder_id))
                 for i, t in sorted(payload.timer_family_specs.items())},
            )
            for name, payload in sorted(self.stateful().items())
        }  # fmt: skip

    def element_coder(self, spec: api.StateSpec) -> object:
        if spec.WhichOneof("spec") == "bag_spec":
            return self.coder(spec.bag_spec.element_coder_id)
        return self.coder(spec.read_modify_write_spec.coder_id)

    def pickles(self) -> dict[str, bytes]:
        """What Beam has pickled, unpacked: it is compressed, so a plain search finds nothing."""
        found = {
            name: bz2.decompress(base64.b64decode(payload.do_fn.payload))
            for name, payload in self.pardos()
        }
        for id, coder in self.proto.components.coders.items():
            if coder.spec.urn == "beam:coder:pickled_python:v1":
                _, _, packed = coder.spec.payload.partition(b"$")  # the coder's name, then it
                found[id] = zlib.decompress(base64.b64decode(packed))
        return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store with a checkpoint of each pipeline."""
    stores = {}
    for name, build in PIPELINES.items():
        stores[name] = tmp_path_factory.mktemp(name) / "ckpt"
        with beam.Pipeline(runner="FnApiRunner") as pipeline:
            build(pipeline, stores[name], until=100)
    return stores


@pytest.fixture(scope="module")
def graphs(
    saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str, str], Graph]:
    """Every pipeline, fresh and restoring, batch and streaming."""
    found = {}
    for name, build in PIPELINES.items():
        empty = tmp_path_factory.mktemp("empty") / "ckpt"
        for kind, store in (("fresh", empty), ("restoring", saved[name])):
            for mode, options in (("batch", []), ("streaming", ["--streaming"])):
                proto, _ = translate(lambda p, b=build, s=store: b(p, s, until=200), *options)
                found[name, kind, mode] = Graph(proto)
    return found


EVERY = [
    (name, kind, mode)
    for name in PIPELINES
    for kind in ("fresh", "restoring")
    for mode in ("batch", "streaming")
]
every_graph = pytest.mark.parametrize("which", EVERY, ids="-".join)


@every_graph
def test_state_and_timers_are_those_of_the_design(which, graphs) -> None:
    graph, (name, _, _) = graphs[which], which
    first = min(OPERATORS[name])
    expected = {
        f"{TOP[name]}WriteSidecars": ({"records", "progress"}, {f"ts-ckpt_writer_{first}"}),
        f"{TOP[name]}Commit": ({"sidecars", "progress"}, {f"ts-ckpt_committer_{first}"}),
    }
    for uid, where in OPERATORS[name].items():
        # Control with the small cells in it, what waits, the author's bag and what is new in it;
        # one clock, whatever timers the author has.
        cells = {"ckpt_control", "ckpt_buffer", "recent", "ckpt_recent_recent"}
        expected[f"{where}/Run"] = (cells, {f"ts-ckpt_clock_{uid}"})
    found = {
        where: (set(payload.state_specs), set(payload.timer_family_specs))
        for where, payload in graph.stateful().items()
    }
    assert found == expected


@every_graph
def test_all_of_it_is_within_what_dataflow_streaming_is_known_to_do(which, graphs) -> None:
    graph = graphs[which]
    for name, payload in graph.pardos():
        protocols = {spec.protocol.urn for spec in payload.state_specs.values()}
        assert protocols <= {BAG}, f"{name}: ordered lists and maps are not on every worker"
        domains = {spec.time_domain for spec in payload.timer_family_specs.values()}
        assert domains <= {api.TimeDomain.EVENT_TIME}, name
        assert not payload.requests_finalization, name
        assert not payload.restriction_coder_id, f"{name} is a splittable DoFn"
        assert not payload.side_inputs, name
    assert list(graph.proto.requirements) == ["beam:requirement:pardo:stateful:v1"]


@every_graph
def test_no_two_timer_families_have_one_name(which, graphs) -> None:
    families = [f for p in graphs[which].stateful().values() for f in p.timer_family_specs]
    assert len(families) == len(set(families)) == 2 + len(OPERATORS[which[0]])


@pytest.mark.parametrize("which", [e for e in EVERY if e[1:] != ("fresh", "batch")], ids="-".join)
def test_live_and_restored_elements_share_one_coder_and_one_windowing(which, graphs) -> None:
    graph = graphs[which]
    pcolls = graph.proto.components.pcollections
    for where in OPERATORS[which[0]].values():
        flatten = graph.named(f"{where}/WithRestored")
        assert flatten.spec.urn == FLATTEN
        (output,) = flatten.outputs.values()
        joined = [pcolls[id] for id in (*flatten.inputs.values(), output)]
        assert len(joined) == 3
        assert len({pcoll.coder_id for pcoll in joined}) == 1
        assert len({pcoll.windowing_strategy_id for pcoll in joined}) == 1
        urn, _, components = graph.coder(joined[0].coder_id)
        assert urn == "beam:coder:kv:v1"
        assert components[0][0] == "beam:coder:string_utf8:v1", "keys keep the author's coder"
        assert list(graph.named(f"{where}/Run").inputs.values()) == [output]


@every_graph
def test_whatever_is_flattened_has_one_windowing_and_one_coder(which, graphs) -> None:
    graph = graphs[which]
    pcolls = graph.proto.components.pcollections
    flattens = [
        t
        for t in graph.proto.components.transforms.values()
        if t.spec.urn == FLATTEN and not t.unique_name.startswith("Create")
    ]
    assert len(flattens) >= 3
    for flatten in flattens:
        ids = (*flatten.inputs.values(), *flatten.outputs.values())
        assert len({pcolls[id].windowing_strategy_id for id in ids}) == 1, flatten.unique_name
        assert len({pcolls[id].coder_id for id in ids}) == 1, flatten.unique_name


@pytest.mark.parametrize("name", PIPELINES)
def test_a_fresh_batch_pays_nothing_for_a_restore(name, graphs) -> None:
    """A batch job is never updated in place, so its graph need not be the restoring one's."""
    fresh, restoring = graphs[name, "fresh", "batch"], graphs[name, "restoring", "batch"]
    assert not any("/Restore/" in part or "/Live" in part for part in fresh.names)
    assert any("/Restore/" in part for part in restoring.names)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_fresh_graph_and_a_restoring_one_are_the_same_to_an_update(name, graphs) -> None:
    fresh, restoring = graphs[name, "fresh", "streaming"], graphs[name, "restoring", "streaming"]
    assert fresh.names == restoring.names
    assert fresh.coders() == restoring.coders()
    assert fresh.specs() == restoring.specs()
    # What it restores is in the DoFn that lists the key groups, and nowhere else by name.
    keys = [f"{where}/Restore/KeyGroups" for where in OPERATORS[name].values()]
    before, after = fresh.pickles(), restoring.pickles()
    assert all(before[key] != after[key] for key in keys)


def test_names_are_the_authors_and_the_uids_never_a_number_or_an_id(graphs) -> None:
    names = graphs["one", "restoring", "streaming"].names
    ours = [name for name in names if name.startswith("Totals/")]
    assert "Totals/Operator/Run" in ours
    assert "Totals/Operator/WithRestored" in ours
    assert not [name for name in ours if any(c.isdigit() for c in name)]


def test_another_process_makes_the_same_graph(tmp_path, graphs) -> None:
    """Whoever updates a job is another process than the one that started it, with other hashes."""
    script = tmp_path / "translate.py"
    script.write_text(
        "import sys, json, base64\n"
        "from pathlib import Path\n"
        "import importlib.util as util\n"
        "spec = util.spec_from_file_location('test_dataflow', sys.argv[1])\n"
        "t = util.module_from_spec(spec); sys.modules['test_dataflow'] = t\n"
        "spec.loader.exec_module(t)\n"
        "proto, _ = t.translate(lambda p: t.chain(p, sys.argv[2], until=200), '--streaming')\n"
        "g = t.Graph(proto)\n"
        "print(json.dumps([g.names, repr(sorted(g.coders().items())), repr(g.specs())]))\n"
    )
    done = subprocess.run(
        [sys.executable, script, __file__, tmp_path / "ckpt"],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = graphs["chain", "fresh", "streaming"]
    names, coders, specs = json.loads(done.stdout.splitlines()[-1])
    assert names == here.names
    assert coders == repr(sorted(here.coders().items()))
    assert specs == repr(here.specs())


def test_an_update_in_place_brings_no_saved_record_and_keeps_the_graph(saved, graphs) -> None:
    """The running job's state is carried over by the service, and has gone on since."""
    store = saved["one"]
    proto, job = translate(lambda p: one(p, store, until=200), "--streaming", "--update")
    assert job.proto.replace_job_id == RUNNING_JOB
    updating, restoring = Graph(proto), graphs["one", "restoring", "streaming"]
    assert updating.names == restoring.names
    assert updating.coders() == restoring.coders()
    assert updating.specs() == restoring.specs()
    listed = "Totals/Operator/Restore/KeyGroups"
    empty = graphs["one", "fresh", "streaming"].pickles()[listed]
    assert updating.pickles()[listed] == empty
    assert restoring.pickles()[listed] != empty


def test_an_update_in_place_with_other_key_groups_is_refused(saved) -> None:
    with pytest.raises(PipelineRefusedError, match=r"key_groups=16.*updated in place has 4"):
        translate(lambda p: one(p, saved["one"], key_groups=16), "--streaming", "--update")


def test_neither_an_option_nor_a_credential_is_in_the_graph(
    gcs_bucket: GcsBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    from google.oauth2.credentials import Credentials

    monkeypatch.setattr("google.auth.default", lambda *_, **__: (Credentials(SECRET), "test"))
    options = {**gcs_bucket.options, "token": "google_default"}
    store: CheckpointStore = open_store(f"{gcs_bucket.url}/ckpt", **options)
    store.claim_generation("run")  # its client is open, and has the credentials
    (proto, _) = translate(
        lambda p: chain(p, store, until=200), "--streaming", f"--a_jobs_api_key={SECRET}"
    )
    pickles = Graph(proto).pickles()
    ours = [name for name, data in pickles.items() if b"beam_ckpt" in data]
    assert len(ours) > 8, "it was not unpacked"
    assert any(gcs_bucket.url.split("/")[2].encode() in pickles[name] for name in ours)
    for name, data in pickles.items():
        assert SECRET.encode() not in data, name
        assert b"api_key" not in data, name
        assert b"PipelineOptions" not in data, name
    # In the graph itself; the options travel beside it, as those of any job.
    assert SECRET.encode() not in proto.components.SerializeToString()


def test_the_search_for_secrets_finds_one() -> None:
    def leak(pipeline: beam.Pipeline) -> None:
        _ = pipeline | beam.Create([1]) | "Leak" >> beam.Map(lambda _, key=SECRET: key)

    proto, _ = translate(leak)
    assert any(SECRET.encode() in data for data in Graph(proto).pickles().values())
    assert SECRET.encode() not in proto.SerializeToString(), "compressed: not found unless unpacked"


def test_the_job_is_far_below_the_limit_of_a_request(saved) -> None:
    """Dataflow takes requests of 20 MB (JSON); restoring must not grow it with the state."""
    proto, job = translate(lambda p: chain(p, saved["chain"], until=200), "--streaming")
    assert len(proto.SerializeToString()) < 200_000
    assert len(str(type(job.proto).to_json(job.proto))) < 1_000_000


class ReadPurchases(beam.PTransform):
    def expand(self, pbegin):
        return pbegin | beam.Create([("ada", 3), ("bob", 5)]) | beam.Map(stamp)


def test_the_pipeline_of_the_docs_page_translates_and_runs(tmp_path: Path) -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    page: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), page)
    where = f"--checkpoint_store={tmp_path / 'ckpt'}"
    proto, _ = translate(lambda p: page["build"](p, ReadPurchases()), "--streaming", where)
    assert "Totals/Run" in Graph(proto).names
    with beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner", where])) as pipeline:
        page["build"](pipeline, ReadPurchases())
    assert sorted(inspect.state(tmp_path / "ckpt", "totals")["key"].to_pylist()) == ["ada", "bob"]
