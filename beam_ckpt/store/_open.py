"""The stores by backend, and `open_store`, which picks by URL."""

from __future__ import annotations

import os

from beam_ckpt.blobs import Blobs, open_blobs
from beam_ckpt.blobs._local import LocalBlobs
from beam_ckpt.blobs._memory import MemoryBlobs
from beam_ckpt.errors import CheckpointNotFoundError, StoreUrlError
from beam_ckpt.store._base import DEFAULT_MAX_STATE_DATA_BYTES, CheckpointStore
from beam_ckpt.store._blobstore import BlobCheckpointStore

__all__ = [
    "FileSystemCheckpointStore",
    "MemoryCheckpointStore",
    "ObjectStoreCheckpointStore",
    "open_store",
]


class FileSystemCheckpointStore(BlobCheckpointStore):
    """Checkpoints in a directory of a local POSIX file system. Reads no peer's namespace."""

    def __init__(
        self,
        path: str | os.PathLike[str] | Blobs,
        *,
        key_group_count: int | None = 1,
        participant_id: int = 0,
        max_state_data_bytes: int = DEFAULT_MAX_STATE_DATA_BYTES,
    ) -> None:
        """Takes the directory, which is created with the first write.

        Args:
            path: The directory (or blobs over one).
            key_group_count: What manifests must have; `None` accepts any.
            participant_id: The namespace.
            max_state_data_bytes: See `CheckpointStore.max_state_data_bytes`.

        Raises:
            StoreUrlError: The path is a file.
        """
        super().__init__(
            path if isinstance(path, Blobs) else LocalBlobs(path),
            key_group_count=key_group_count,
            participant_id=participant_id,
            max_state_data_bytes=max_state_data_bytes,
        )


class ObjectStoreCheckpointStore(BlobCheckpointStore):
    """Checkpoints in a bucket, below a prefix: `gs://` and what else fsspec reaches."""

    def __init__(
        self,
        url: str | Blobs,
        *,
        key_group_count: int | None = 1,
        participant_id: int = 0,
        max_state_data_bytes: int = DEFAULT_MAX_STATE_DATA_BYTES,
        **storage_options: object,
    ) -> None:
        """Takes the URL; nothing is read or written.

        Args:
            url: `gs://bucket/prefix`, another fsspec URL (or blobs).
            key_group_count: What manifests must have; `None` accepts any.
            participant_id: The namespace.
            max_state_data_bytes: See `CheckpointStore.max_state_data_bytes`.
            **storage_options: For the backend's client.
        """
        super().__init__(
            url if isinstance(url, Blobs) else open_blobs(url, **storage_options),
            key_group_count=key_group_count,
            participant_id=participant_id,
            max_state_data_bytes=max_state_data_bytes,
        )


class MemoryCheckpointStore(BlobCheckpointStore):
    """Checkpoints in the memory of this process, shared by name: for tests."""

    def __init__(
        self,
        name: str | Blobs,
        *,
        key_group_count: int | None = 1,
        participant_id: int = 0,
        max_state_data_bytes: int = DEFAULT_MAX_STATE_DATA_BYTES,
    ) -> None:
        """Takes the name.

        Args:
            name: Stores of one name are one store (or blobs).
            key_group_count: What manifests must have; `None` accepts any.
            participant_id: The namespace.
            max_state_data_bytes: See `CheckpointStore.max_state_data_bytes`.
        """
        super().__init__(
            name if isinstance(name, Blobs) else MemoryBlobs(name),
            key_group_count=key_group_count,
            participant_id=participant_id,
            max_state_data_bytes=max_state_data_bytes,
        )


def _is_store(store: BlobCheckpointStore) -> bool:
    with store._io("looking at", ""):
        if not store.blobs.exists():
            return False
    return bool(store.deployment_id or store.list_ids())


def open_store(
    url_or_path: str | os.PathLike[str] | CheckpointStore,
    *,
    key_group_count: int | None = None,
    participant_id: int = 0,
    max_state_data_bytes: int = DEFAULT_MAX_STATE_DATA_BYTES,
    create: bool = True,
    **storage_options: object,
) -> CheckpointStore:
    """Opens a checkpoint store. Nothing is written until something is saved.

    Args:
        url_or_path: A local path or `file://` URL, `memory://name`, `gs://bucket/prefix` or
            another fsspec URL. A store is returned as it is.
        key_group_count: What manifests must have; `None` accepts what each says.
        participant_id: The namespace, 0 for the only one.
        max_state_data_bytes: For one sidecar, and for the state that one call holds in memory.
        create: False refuses a place where there is no store yet.
        **storage_options: For the backend's client, such as `token=`.

    Raises:
        StoreUrlError: The URL cannot be a store, such as the path of a file.
        CheckpointNotFoundError: There is no store, and `create` is False.

    Example:
        >>> store = open_store("memory://docs-open-store")
        >>> store.list_ids()
        []
    """
    if isinstance(url_or_path, CheckpointStore):
        if storage_options:
            raise StoreUrlError(
                f"{url_or_path!r} is open already: give storage options where it is opened"
            )
        return url_or_path
    blobs = open_blobs(url_or_path, **storage_options)
    kind: type[FileSystemCheckpointStore | MemoryCheckpointStore | ObjectStoreCheckpointStore]
    if isinstance(blobs, LocalBlobs):
        kind = FileSystemCheckpointStore
    elif isinstance(blobs, MemoryBlobs):
        kind = MemoryCheckpointStore
    else:
        kind = ObjectStoreCheckpointStore
    store = kind(
        blobs,
        key_group_count=key_group_count,
        participant_id=participant_id,
        max_state_data_bytes=max_state_data_bytes,
    )
    if not create and not _is_store(store):
        raise CheckpointNotFoundError(
            f"there is no checkpoint store at {store.url}: check the path, or run the pipeline "
            "that writes it"
        )
    return store
