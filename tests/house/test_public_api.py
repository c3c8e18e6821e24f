"""The public API, frozen: names, parameters, kinds and defaults that users' code relies on.

A change here is a change for every user. Adding a keyword with a default is none; renaming or removing one is.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NAMES = {
    "penstock.client": {
        "Appliance",
        "DataExecutor",
        "DataLoader",
        "DataLoaderCheckpoint",
        "Lookahead",
        "RestartableDataLoader",
        "checkpoint_closure",
        "compute_num_steps",
        "get_streaming_batch_size",
        "get_worker_state",
        "infer_batch_size",
    },
    "penstock.client.checkpoint": {"AsyncCheckpointer", "AsyncFileSystemWriter", "Progress"},
    "penstock.client.integrations.jax": {"as_numpy", "numpy_batches", "state_from_json", "state_to_json"},
    "penstock.client.integrations.megatron_data": {"DataIterator", "RankGroups", "box_appliance"},
    "penstock.client.testing": {"FakeAppliance", "Fault", "InputError", "LostWorker", "SlowBatch"},
    "penstock.worker": {"collate", "current_assignment", "empty", "get_streaming_batch_size"},
    "penstock.data": {
        "AudioClip",
        "Balance",
        "CSVWriter",
        "Chunked",
        "Cursor",
        "Filtered",
        "Grouped",
        "JSONWriter",
        "LanceRows",
        "LineFile",
        "LogicalShards",
        "MDSWriter",
        "Mapped",
        "MegatronDocuments",
        "Mixture",
        "Packed",
        "Ramp",
        "Repeated",
        "ShardedSource",
        "SkipSample",
        "Savable",
        "Schedule",
        "ShardLoader",
        "MapLoader",
        "Stream",
        "StreamingDataset",
        "StreamingLoader",
        "SyntheticDataset",
        "TSVWriter",
        "VideoClip",
        "WindowShuffled",
        "XSVWriter",
        "Converted",
        "convert_dataset",
        "energon_blend",
        "energon_concat",
        "collate_packed",
        "index_folder",
        "index_parquet",
        "index_table",
        "megatron_blend",
        "merge_index",
    },
}
"""Public module -> names that it exports at least."""

SIGNATURES = {
    "penstock.client:DataLoader": "(input_fn, *args, **kwargs)",
    "penstock.client:DataLoader.state_dict": "(self)",
    "penstock.client:DataLoader.state_at": "(self, step)",
    "penstock.client:DataLoader.load_state_dict": "(self, sd, strict=True, layers='keep')",
    "penstock.client:DataLoader.__len__": "(self)",
    "penstock.client:DataLoader.config": "(self)",
    "penstock.client:DataLoader.can_restore_sample": "(self)",
    "penstock.client:DataLoader.restore_sample": "(self, key)",
    "penstock.client:DataLoader.checkpoints": "(self, step=None)",
    "penstock.client:compute_num_steps": (
        "(dataloader, initial_step=0, num_steps=None, max_steps=None, num_epochs=None, steps_per_epoch=None, "
        "grad_accum_steps=1)"
    ),
    "penstock.client:get_streaming_batch_size": "(effective_batch_size, global_rank=None)",
    "penstock.client:infer_batch_size": "(data, batch_size=None)",
    "penstock.client:DataLoader.__iter__": "(self)",
    "penstock.client:DataExecutor": (
        "(loader, num_steps=None, checkpoint_steps=None, *, appliance=None, persistent=False, rest_only=False)"
    ),
    "penstock.client:DataExecutor.__iter__": "(self)",
    "penstock.client:Lookahead": "(loader, *, depth=1, checkpoint_steps=None, appliance=None)",
    "penstock.client:Lookahead.took": "(self)",
    "penstock.client:Lookahead.handed_out": "(self, batches)",
    "penstock.client:Lookahead.state_dict": "(self)",
    "penstock.client:Lookahead.load_state_dict": "(self, sd, strict=True, layers='keep')",
    "penstock.client:RestartableDataLoader.state_dict": "(self)",
    "penstock.client:RestartableDataLoader.load_state_dict": "(self, state_dict, strict=True)",
    "penstock.client:RestartableDataLoader.aggregate_state_dict": "(self, worker_states)",
    "penstock.client:RestartableDataLoader.deaggregate_state_dict": "(self, aggregated, strict=True)",
    "penstock.client:get_worker_state": "()",
    "penstock.client.checkpoint:AsyncCheckpointer.save": "(self, step, state)",
    "penstock.client.checkpoint:AsyncCheckpointer.prepare": "(self, state)",
    "penstock.client.checkpoint:AsyncCheckpointer.wait": "(self, timeout_s=None)",
    "penstock.client.checkpoint:AsyncCheckpointer.result": "(self, timeout_s=None)",
    "penstock.client.checkpoint:AsyncCheckpointer.latest": "(self)",
    "penstock.client.checkpoint:AsyncCheckpointer.restore": (
        "(self, state, step=None, *, verify=False, allow_unsafe_types=False)"
    ),
    "penstock.client.checkpoint:AsyncCheckpointer.close": "(self, *, abandon=False)",
    "penstock.client.integrations.jax:as_numpy": "(batch)",
    "penstock.client.integrations.jax:numpy_batches": "(batches)",
    "penstock.client.integrations.jax:state_from_json": "(saved)",
    "penstock.client.integrations.jax:state_to_json": "(state)",
    "penstock.worker:collate": "(samples)",
    "penstock.worker:current_assignment": "()",
    "penstock.worker:empty": "(shape, dtype=None)",
    "penstock.data:ShardLoader.restore_sample": "(self, key)",
    "penstock.data:ShardLoader.set_epoch": "(self, epoch)",
    "penstock.data:ShardedSource.open": "(self, shard, epoch, seed, saved=None, position_of=None)",
    "penstock.data:MapLoader.restore_sample": "(self, key)",
    "penstock.data:MapLoader.set_epoch": "(self, epoch)",
    "penstock.data:MapLoader.state_after": "(self, batches)",
    "penstock.data:StreamingDataset.__getitem__": "(self, index)",
    "penstock.data:StreamingDataset.__len__": "(self)",
    "penstock.data:StreamingLoader.restore_sample": "(self, key)",
    "penstock.data:StreamingLoader.set_epoch": "(self, epoch)",
    "penstock.data:StreamingLoader.state_after": "(self, batches)",
    "penstock.data:index_parquet": (
        "(folder, *, storage_options=None, out=None, split=None, hashes=False, ranges=True, timeout_s=600.0)"
    ),
    "penstock.data:index_table": "(uri, snapshot=None, *, out=None, storage_options=None, timeout_s=600.0)",
    "penstock.data:merge_index": "(folder, parts=None, *, storage_options=None, timeout_s=600.0, append=False)",
}
"""module:name -> its parameters, without annotations."""

ATTRIBUTES = {
    "penstock.client:DataLoader": {
        "batch_size",
        "dataloader",
        "input_fn",
        "input_fn_params",
        "is_restartable",
    },
    "penstock.client:DataExecutor": {
        "dataloader",
        "is_initial_step",
        "iteration",
        "on_checkpoint_step",
        "on_final_iteration",
        "step",
        "user_iteration",
    },
    "penstock.client.checkpoint:AsyncCheckpointer": {"progress"},
}
"""module:class -> what is read without being called."""

KEYWORDS = {
    "penstock.client.checkpoint:AsyncCheckpointer": (
        "folder keep_last keep_every threads separation_hint fsync buffers timeout_s on_exit check_replicas group"
    ),
    "penstock.client.checkpoint:AsyncFileSystemWriter": (
        "path thread_count separation_hint sync_files overwrite transforms"
    ),
    "penstock.data:ShardedSource.open": "shard epoch seed saved position_of",
    "penstock.data:ShardLoader": (
        "source batch_size global_batch_size seed partitions block tail keys rank collate_fn unbatched"
    ),
    "penstock.data:MapLoader": (
        "dataset batch_size global_batch_size shuffle seed shuffle_block num_samples tail skip "
        "fetch_threads reseed keys rank collate_fn"
    ),
    "penstock.data:Stream": "remote local split proportion repeat choose storage_options columns",
    "penstock.data:StreamingDataset": (
        "remote local split streams cache_limit validate_hash keep_zip timeout_s download_threads cache_group "
        "allow_unsafe_types images clips columns decoded_limit storage_options"
    ),
    "penstock.data:StreamingLoader": (
        "dataset batch_size global_batch_size shuffle seed shuffle_block shuffle_memory partitions interleave "
        "epoch_size tail skip predownload prefetch_seconds fetch_threads reseed keys rank collate_fn"
    ),
    "penstock.data:LogicalShards": "pieces shards counts shuffle shuffle_block max_open names",
    "penstock.data:Savable": ("make shards snapshot_every snapshot_s capture_rng batch_rows config"),
    "penstock.data.writing.writers:Writer": "out columns compression hashes size_limit exist_ok",
}
"""module:class -> parameters that it has at least."""

APPLIANCE_KEYWORDS = {"num_workers_per_box", "box", "num_boxes", "job", "seed", "device"}

CHECKPOINT_FIELDS = {
    "local_worker_id": 1,
    "num_workers_per_csx": 4,
    "num_csx": 3,
    "wse_id": 2,
    "appliance_step": 10,
    "worker_step": 3,
    "samples_streamed": 96,
    "user_state_dict": {"cursor": 7},
}
"""The fields of DataLoaderCheckpoint, with an example."""


def resolve(place: str) -> Any:
    """The object at "module:name" or "module:class.method"."""
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def parameters(function: Callable[..., Any]) -> str:
    """The signature as text without annotations: these may be made more precise at any time."""
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("module", NAMES)
def test_module_exports_its_names(module: str) -> None:
    public = importlib.import_module(module)
    assert NAMES[module] <= set(public.__all__)
    assert [name for name in public.__all__ if not hasattr(public, name)] == []


@pytest.mark.parametrize("place", SIGNATURES)
def test_signature(place: str) -> None:
    assert parameters(resolve(place)) == SIGNATURES[place]


@pytest.mark.parametrize("place", KEYWORDS)
def test_keywords(place: str) -> None:
    assert set(KEYWORDS[place].split()) <= set(inspect.signature(resolve(place)).parameters)


@pytest.mark.parametrize("place", ATTRIBUTES)
def test_attributes_are_read_not_called(place: str) -> None:
    owner = resolve(place)
    for name in ATTRIBUTES[place]:
        declared = name in inspect.get_annotations(owner)
        assert declared or not callable(inspect.getattr_static(owner, name)), name


def test_appliance_signature() -> None:
    # The defaults of the keywords are not frozen as objects: they come from the environment, so that the signature has
    # to tell "not given" from the value.
    address, *rest = inspect.signature(resolve("penstock.client:Appliance")).parameters.values()
    assert (address.name, address.kind, address.default) == ("address", inspect.Parameter.POSITIONAL_OR_KEYWORD, None)
    assert {parameter.name for parameter in rest} >= APPLIANCE_KEYWORDS
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in rest)
    assert all(parameter.default is not inspect.Parameter.empty for parameter in rest)


def test_data_loader_checkpoint_fields_and_ids() -> None:
    kind = resolve("penstock.client:DataLoaderCheckpoint")
    assert CHECKPOINT_FIELDS.keys() <= {field.name for field in dataclasses.fields(kind)}
    checkpoint = kind(**CHECKPOINT_FIELDS)
    assert {name: getattr(checkpoint, name) for name in CHECKPOINT_FIELDS} == CHECKPOINT_FIELDS
    assert checkpoint.global_worker_id == 2 * 4 + 1
    assert checkpoint.total_num_workers == 4 * 3
    with pytest.raises(AttributeError):
        checkpoint.wse_id = 0


def test_assignment_is_neutral_outside_a_worker() -> None:
    here = resolve("penstock.worker:current_assignment")()
    assert (here.box, here.num_boxes) == (0, 1)
    assert (here.slot, here.num_workers_per_box, here.global_worker_id) == (0, 1, 0)
    assert isinstance(here.seed, int)
    assert isinstance(here.first_step, int)


@pytest.mark.parametrize("name", ["penstock.client", "penstock.client.checkpoint", "penstock.data"])
def test_lazy_names_are_those_of_type_checkers(name: str) -> None:
    package: Any = importlib.import_module(name)
    blocks = [each for each in ast.parse(Path(package.__file__).read_text()).body if isinstance(each, ast.If)]
    found = [each for block in blocks for each in block.body if isinstance(each, ast.ImportFrom)]
    pairs = {(one.name, each.module) for each in found for one in each.names}
    lazy = {
        (one, name + module if module[0] == "." else module)
        for module, names in package._BY_MODULE.items()
        for one in names
    }
    assert pairs == lazy
    assert {one for one, _ in pairs} == set(package.__all__) <= set(dir(package))
    for one in package.__all__:
        assert getattr(package, one) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        package.Nothing  # noqa: B018
