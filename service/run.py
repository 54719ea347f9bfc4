"""Jobs from files in one process, without HTTP; run again on the same output it goes on where it was."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
from pydantic import ValidationError

from roundhouse_client.job_files import JobFileInvalid, ReadJob, with_rows
from service.config.schema import Config, rules_of
from service.conversations.job import Job, JobId, SpokenBy
from service.conversations.job_parser import MAX_FAULTS, parse_job
from service.conversations.limits import posted_agents
from service.conversations.spec import JobSpec
from service.conversations.states import ENDED_JOBS, JobState
from service.conversations.transcript import rfc3339
from service.errors import ConfigError, ConversationNotFound, Fault, InvalidJob, JobNotFound, StoreError
from service.export import Export, folder_for
from service.formats.documents import Place, digest_of, line_of, parse_document
from service.formats.faults import faults_of, nearest_path, path_of
from service.formats.result_form import ResultForm
from service.node.jobs import Jobs, JobView
from service.node.node import Node, open_node
from service.node.results import result_pieces
from service.store import queries
from workers.spec import WorkerSpec

STORE_FOLDER: Final = ".roundhouse"
FOR_EVER_S: Final = 3e9  # a job file that is run again on its output is the same job, however late
LOOK_INTERVAL_S: Final = 0.25  # how often progress is shown, and how long an ended conversation waits for its file


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """One job file that is valid for the configuration."""

    source: str
    document: object
    job: Job


def read_job_file(source: str, text: str, config: Config, model: str | None = None) -> JobFile:
    """Return the job that a YAML or JSON text describes; with ``model`` all its agents speak with that one.

    Raises:
        ConfigError: with everything that is wrong with it, each with its line where that is known.
    """
    document, lines = parse_document(text, source)
    read = with_rows_of(document, source, lines)
    document = document if read is None else read.document
    if isinstance(document, dict) and "models" in document and "agents" not in document:
        raise ConfigError(f"{source}: this looks like a configuration; a job has agents and conversations")
    if model is not None and isinstance(document, dict):
        for _, agent in posted_agents(document):
            if agent.get("by") != SpokenBy.CALLER and ("model" in agent or "id" in agent):  # not all of a cast have one
                agent["model"] = model
    try:
        job = parse_job(document, JobId(source), rules_of(config))
    except InvalidJob as error:
        raise ConfigError(told_with_lines(error.faults, source, lines, read)) from error
    return JobFile(source=source, document=document, job=job)


def refuse_shape(document: object, source: str, lines: Mapping[Place, int]) -> None:
    """Refuse a job whose fields are none of a job's, or of other types; a service may still refuse what passes.

    Raises:
        ConfigError: with every such fault, each with its line where that is known.
    """
    try:
        JobSpec.model_validate(document)
    except ValidationError as error:
        raise ConfigError(told_with_lines(faults_of(error, JobSpec)[:MAX_FAULTS], source, lines, None)) from error


def told_with_lines(faults: Iterable[Fault], source: str, lines: Mapping[Place, int], read: ReadJob | None) -> str:
    """Return the lines that tell faults of a job, each behind its file and, where it is known, its line there."""
    places = {path_of(place): place for place in lines}

    def line(fault: Fault) -> str:
        return source + line_of(lines, places.get(nearest_path(fault.path, places), ()))

    return "\n".join(f"{(read and read.place_of(fault.path)) or line(fault)}: {fault}" for fault in faults)


def with_rows_of(document: object, source: str, lines: Mapping[Place, int]) -> ReadJob | None:
    """Return a job's document with its conversations, where it names a file of them; None where it is none.

    ``lines`` are those of its keys.

    Raises:
        ConfigError: with everything that is wrong with that file, each with its line.
    """
    if not isinstance(document, dict):
        return None
    try:
        return with_rows(document, Path(source).parent, source)
    except JobFileInvalid as error:
        raise ConfigError("\n".join(_with_line(fault, source, lines) for fault in error.faults)) from error


def _with_line(fault: str, source: str, lines: Mapping[Place, int]) -> str:
    """Return a fault of a key of the job file with its line."""
    place, told, rest = fault.removeprefix(f"{source}: ").partition(":")
    if not fault.startswith(f"{source}: conversations") or not told:
        return fault
    return f"{source}{line_of(lines, tuple(place.split('.')))}: {place}:{rest}"


async def run_jobs(
    config: Config,
    specs: Sequence[WorkerSpec],
    files: Sequence[JobFile],
    output: Path,
    show: Callable[[Sequence[JobView], Node], Awaitable[None]],
    form: ResultForm | None = None,
) -> list[JobView]:
    """Run the jobs to their ends and return them; their transcripts are under ``output``.

    With a ``form`` the result of each stands in a file beside its transcripts.

    Raises:
        ConfigError: two jobs would write to the same folder.
        StartFailed: an engine could not be started, or all of a model have given up.
        StoreError: the output folder is in use or cannot be written.
    """
    folders = [folder_for(output, file.job.name) for file in files]
    for index, folder in enumerate(folders):
        if folder in folders[:index]:
            raise ConfigError(f"{files[index].source}: name: another job is named {files[index].job.name!r} as well")
    # Whatever store the service uses: what is run here is kept beside its transcripts.
    kept = config.store.model_copy(update={"url": "sqlite", "keep_keys_s": FOR_EVER_S})
    own = config.model_copy(update={"store": kept})
    async with open_node(own, specs, output / STORE_FOLDER) as node:
        for file, folder in zip(files, folders, strict=True):
            await _check_owner(node, file, folder)
        await node.fleet.wait_ready(first_try_only=True)
        await node.catalog.wait_settled()
        posted = {
            await _post(node, file): (Export(folder), digest_of(file.document))
            for file, folder in zip(files, folders, strict=True)
        }
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.callers.run)  # not the intake: what was interrupted on this output is left alone
            views = await _until_ended(node, posted, show)
            tasks.cancel_scope.cancel()
        for view, folder in zip(views, folders, strict=True):
            if form is not None:
                await _write_result(node.jobs, view, folder / result_file(form), form)
        await node.shut_down(0.0, anyio.Event())
    return views


async def _check_owner(node: Node, file: JobFile, folder: Path) -> None:
    """Check that a job's folder holds no transcripts of another job.

    Raises:
        ConfigError: they do; only their owner may throw them away.
    """
    owner = await anyio.to_thread.run_sync(lambda: Export(folder).owner)
    known = await node.store.read(queries.job_by_key(_key(file), digest_of(file.document), datetime.now(UTC)))
    if owner is not None and (known is None or known.id != owner):
        raise ConfigError(
            f"{file.source}: {folder} holds the transcripts of another job named {file.job.name!r}, or of this one "
            "before it was changed; give --output another folder, or remove that one"
        )


def _key(file: JobFile) -> str:
    return f"run:{file.job.name}:{digest_of(file.document)}"


async def _post(node: Node, file: JobFile) -> JobId:
    # The same job on the same output is the same job: finished, it is only exported again; unfinished, it goes on.
    try:
        stored, is_new = await node.jobs.post(file.document, _key(file))
    except InvalidJob as error:  # what only the store knows: what a conversation is from
        raise ConfigError("\n".join(f"{file.source}: {fault}" for fault in error.faults)) from error
    except (JobNotFound, ConversationNotFound) as error:
        raise ConfigError(f"{file.source}: from: {error}") from error
    if not is_new:
        await node.intake.claim_jobs(stored.id)
    return stored.id


async def _until_ended(
    node: Node, exports: Mapping[JobId, tuple[Export, str]], show: Callable[[Sequence[JobView], Node], Awaitable[None]]
) -> list[JobView]:
    while True:
        views = [await node.jobs.get(job_id) for job_id in exports]
        await node.intake.go_on(exports)
        for view in views:
            await _write_ended(node.jobs, view, *exports[view.stored.id])
        await show(views, node)
        if all(view.stored.state in ENDED_JOBS for view in views):
            return views
        node.fleet.check_models()
        await anyio.sleep(LOOK_INTERVAL_S)


async def _write_ended(jobs: Jobs, view: JobView, export: Export, file_hash: str) -> None:
    """Write the conversations that have ended and are not written yet, beside the event loop."""
    job_id = view.stored.id
    fresh = [name for name in await jobs.ended_conversations(job_id) if name not in export]
    if fresh or (view.stored.state in ENDED_JOBS and export.job_state != view.stored.state):
        transcripts = [await jobs.transcript(job_id, name) for name in fresh]
        given_up = [each.document for each in await jobs.given_up(job_id)]
        manifest = {**_manifest(view, file_hash), "given_up": given_up}
        await anyio.to_thread.run_sync(export.write, manifest, transcripts)


def result_file(form: ResultForm) -> str:
    """Return the name of the file that a job's result stands in."""
    return f"result.{form}"


async def _write_result(jobs: Jobs, view: JobView, path: Path, form: ResultForm) -> None:
    half = path.with_name(f".{path.name}.half")
    try:
        async with await anyio.open_file(half, "wb") as file:
            async for piece in result_pieces(jobs, view.stored, form):
                await file.write(piece)
        half.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error}") from error


def ended_before(file: JobFile, output: Path) -> str | None:
    """Return the state in which a file's job has ended whose transcripts are in ``output``; None where it has not."""
    export = Export(folder_for(output, file.job.name))
    manifest = export.manifest
    is_it = export.is_whole and manifest.get("document") == digest_of(file.document)
    state = manifest.get("state")
    return state if is_it and isinstance(state, str) and state in ENDED_JOBS else None


def _manifest(view: JobView, file_hash: str) -> Mapping[str, object]:
    stored = view.stored
    return {
        "id": stored.id,
        "name": stored.name,
        "state": stored.state,
        "created_at": rfc3339(stored.created_at),
        "started_at": rfc3339(stored.started_at),
        "finished_at": rfc3339(stored.finished_at),
        "document": file_hash,
    }


def has_failures(views: Sequence[JobView]) -> bool:
    """Whether any job did not complete whole."""
    return any(view.stored.state is not JobState.COMPLETED for view in views)
