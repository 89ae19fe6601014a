"""Every setting is a pipeline option too; what wins over what; and options stay out of DoFns."""

from __future__ import annotations

import inspect
import re
import uuid
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.utils.timestamp import Timestamp

from beam_ckpt import errors, open_store
from beam_ckpt.retention import KeepFor, KeepLast
from beam_ckpt.testing import cuts
from beam_ckpt.transforms import CheckpointedParDo, CheckpointOptions, Checkpoints
from beam_ckpt.transforms.options import FAST_STATE_CACHE, given_settings

S = 1_000_000
README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
FLAGS = {
    "store": "checkpoint_store",
    "every": "checkpoint_every",
    "until": "checkpoint_until",
    "restore": "restore_from",
    "keep": "checkpoint_keep",
    "key_groups": "checkpoint_key_groups",
    "alignment": "checkpoint_alignment",
    "late": "checkpoint_late",
    "on_fallback": "checkpoint_on_fallback",
    "on_missing": "checkpoint_on_missing",
    "max_files_per_group": "checkpoint_max_files_per_group",
    "inline_threshold": "checkpoint_inline_threshold",
    "shared_threshold": "checkpoint_shared_threshold",
}


class CountFn(beam.DoFn):
    COUNT = ReadModifyWriteStateSpec("count", VarIntCoder())

    def process(self, element, count=beam.DoFn.StateParam(COUNT)):
        count.write((count.read() or 0) + element[1])
        yield element[0], count.read()


def given(*arguments: str) -> dict[str, Any]:
    return dict(given_settings(PipelineOptions(list(arguments))))


def pipeline(*arguments: str) -> beam.Pipeline:
    return beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner", *arguments]))


def test_every_setting_has_an_option_and_every_option_is_in_the_readme():
    settings = set(inspect.signature(Checkpoints.__init__).parameters) - {"self", "pipeline"}
    # These two are part of a change of code.
    assert settings == set(FLAGS) | {"migrations", "renamed"}
    known = CheckpointOptions([]).get_all_options(add_extra_args_fn=None)
    assert set(FLAGS.values()) <= set(known)
    own = set(re.findall(r"`--(checkpoint_\w+|restore_from)`", README))
    assert own == {*FLAGS.values(), FAST_STATE_CACHE}


@pytest.mark.parametrize(
    ("argument", "setting", "value"),
    [
        ("--checkpoint_store=gs://bucket/a b", "store", "gs://bucket/a b"),
        ("--checkpoint_every=60", "every", 60),
        ("--checkpoint_every=0.25", "every", 0.25),
        ("--checkpoint_until=-7", "until", -7),
        ("--checkpoint_until=2013-06-01T00:00:00Z", "until", Timestamp(1370044800)),
        ("--restore_from=latest", "restore", "latest"),
        ("--restore_from=fresh", "restore", "fresh"),
        ("--restore_from=12", "restore", 12),
        ("--restore_from=before-it", "restore", "before-it"),
        ("--restore_from=tag:12", "restore", "12"),
        ("--checkpoint_keep=5", "keep", KeepLast(5)),
        ("--checkpoint_keep=1d12h", "keep", KeepFor(hours=36)),
        ("--checkpoint_keep=5|7d", "keep", KeepLast(5) | KeepFor(days=7)),
        ("--checkpoint_keep=7d & 5", "keep", KeepFor(days=7) & KeepLast(5)),
        ("--checkpoint_key_groups=16", "key_groups", 16),
        ("--checkpoint_alignment=at_least_once", "alignment", "at_least_once"),
        ("--checkpoint_late=reprocess", "late", "reprocess"),
        ("--checkpoint_on_fallback=accept", "on_fallback", "accept"),
        ("--checkpoint_on_missing=drop", "on_missing", "drop"),
        ("--checkpoint_max_files_per_group=2", "max_files_per_group", 2),
        ("--checkpoint_inline_threshold=4096", "inline_threshold", 4096),
    ],
)
def test_the_text_of_an_option_is_read(argument, setting, value):
    assert given(argument) == {setting: value}


def test_an_option_that_code_set_may_be_the_value_itself():
    options = PipelineOptions(checkpoint_every=60, checkpoint_keep=KeepLast(2))
    assert dict(given_settings(options)) == {"every": 60, "keep": KeepLast(2)}
    assert given() == {}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--checkpoint_every=hourly", r"--checkpoint_every='hourly' cannot be read.*seconds"),
        ("--checkpoint_until=2013-06-01Tnoon", r"--checkpoint_until=.*RFC 3339"),
        ("--checkpoint_keep=some", r"--checkpoint_keep='some'.*no duration.*a number, an age"),
        ("--checkpoint_keep=0", r"--checkpoint_keep='0'.*at least 1"),
        ("--checkpoint_keep=1|2|3", r"--checkpoint_keep='1\|2\|3' cannot be read"),
        ("--checkpoint_key_groups=x", r"--checkpoint_key_groups='x' cannot be read"),
        ("--checkpoint_key_groups=0", "0"),
        ("--checkpoint_every=-1", "every=-1 is no interval"),
        ("--checkpoint_alignment=both", "alignment='both' is not known"),
        ("--checkpoint_late=maybe", "late='maybe' is not known"),
        ("--checkpoint_on_missing=keep", "on_missing='keep' is not known"),
        ("--checkpoint_on_fallback=yes", "on_fallback='yes' is not known"),
        ("--checkpoint_max_files_per_group=0", "max_files_per_group=0"),
        ("--checkpoint_inline_threshold=9999999", "inline_threshold=9999999"),
    ],
)
def test_an_option_that_cannot_be_right_is_refused(argument, message):
    with pytest.raises(errors.PipelineRefusedError, match=message):
        Checkpoints(pipeline(argument), "memory://options")


def stamped(p: beam.Pipeline) -> Any:
    data = [(second * S, "ab"[second % 2], second) for second in range(0, 100, 5)]
    return p | beam.Create(data) | beam.Map(cuts._stamp).with_output_types(tuple[str, int])


def run(*arguments: str, store: Any = None, **settings: Any) -> None:
    with pipeline(*arguments) as p:
        _ = stamped(p) | CheckpointedParDo(CountFn(), uid="count", store=store, **settings)


def test_options_win_over_code():
    url = f"memory://{uuid.uuid4().hex}"
    in_code = f"memory://{uuid.uuid4().hex}"
    run(
        f"--checkpoint_store={url}", "--checkpoint_every=25", "--checkpoint_until=90",
        "--checkpoint_keep=10", "--checkpoint_key_groups=3",
        store=in_code, every=10, until=50, keep=1, key_groups=1,
    )  # fmt: skip
    assert open_store(in_code).list_ids() == []
    store = open_store(url)
    manifests = [store.load_by_id(i) for i in store.list_ids()]
    assert [m.boundary for m in manifests] == [25 * S, 50 * S, 75 * S, 90 * S]
    assert {m.key_group_count for m in manifests} == {3}
    store.tag("half way", 2)
    for argument, found in (("--restore_from=1", 1), ("--restore_from=half way", 2)):
        assert Checkpoints(pipeline(argument), url, restore="fresh").restored.id == found
    assert Checkpoints(pipeline("--restore_from=fresh"), url, restore=1).restored is None


def test_the_other_settings_reach_the_checkpoints():
    ckpt = Checkpoints(
        pipeline(
            "--checkpoint_store=memory://options-other", "--checkpoint_alignment=at_least_once",
            "--checkpoint_late=reprocess", "--checkpoint_on_missing=drop",
            "--checkpoint_max_files_per_group=2", "--checkpoint_inline_threshold=4096",
        )
    )  # fmt: skip
    assert (ckpt._aligned, ckpt._late) == (False, "reprocess")
    assert (ckpt._on_missing, ckpt._max_files) == ("drop", 2)
    assert ckpt._inline_threshold == 4096


def test_a_damaged_newest_checkpoint_is_passed_over_where_the_option_says_so():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    run(store=store, every=50, until=100, key_groups=1)
    new = store.load_by_id(2).sidecar_paths() - store.load_by_id(1).sidecar_paths()
    store.blobs.delete_many(sorted(new))
    with pytest.raises(errors.FallbackRefusedError):
        Checkpoints(pipeline(), store, until=200)
    ckpt = Checkpoints(pipeline("--checkpoint_on_fallback=accept"), store, until=200)
    assert ckpt.restored.id == 1


def test_a_store_that_was_made_by_hand_stays_where_it_is():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    other = f"memory://{uuid.uuid4().hex}"
    run(f"--checkpoint_store={other}", store=store)
    assert store.list_ids() == [1]
    assert open_store(other).list_ids() == []


def test_without_a_store_in_code_or_options_there_are_no_checkpoints():
    with pytest.raises(errors.PipelineRefusedError, match=r"no store.*--checkpoint_store"):
        run()


def parts(part: Any) -> Any:
    yield part
    for child in part.parts:
        yield from parts(child)


def test_options_are_in_no_dofn():
    url = f"memory://{uuid.uuid4().hex}"
    p = pipeline("--job_name=a-name-to-look-for", f"--checkpoint_store={url}")
    with Checkpoints(p, every=50) as ckpt:
        read = stamped(p) | ckpt.TrackOffsets(
            "log", partition=lambda kv: kv[0], offset=lambda kv: kv[1]
        )
        _ = read | ckpt.ParDo(CountFn(), uid="count")
    fns = [
        part.transform.fn
        for part in parts(p.transforms_stack[0])
        if isinstance(getattr(part.transform, "fn", None), beam.DoFn)
    ]
    assert {"StatefulWrapper", "WriteSidecarsFn", "CommitFn", "OffsetsFn"} <= {
        type(fn).__name__ for fn in fns
    }
    for fn in fns:
        dumped = _bytes(fn)
        assert b"a-name-to-look-for" not in dumped, fn
        assert b"PipelineOptions" not in dumped, fn
        assert b"CheckpointOptions" not in dumped, fn
    held = _bytes([p.options.view_as(CheckpointOptions).get_all_options(drop_default=True)])
    assert b"a-name-to-look-for" in held, "this test would see it"


def _bytes(value: Any) -> bytes:
    """A pickle that was not compressed."""
    from apache_beam.internal.cloudpickle import cloudpickle

    return cloudpickle.dumps(value)
