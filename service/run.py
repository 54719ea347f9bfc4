"""Jobs from files in one process, without HTTP; a second run on the same output continues the first."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from roundhouse_client.job_files import JobFileInvalid, ReadJob, with_rows
from service.config.schema import Config, rules_of
from service.conversations.document.job_parser import make_job
from service.conversations.document.reading import read_spec, rewritten, spec_of
from service.conversations.document.spec import JobSpec, spoken_with
from service.conversations.job.job import Job, JobId
from service.conversations.job.states import ENDED_JOBS
from service.conversations.record.transcript import rfc3339
from service.errors import ConfigError, ConversationNotFound, Fault, InvalidJob, JobNotFound, StoreError
from service.export import Export, folder_for
from service.formats.documents import Place, digest_of, line_of, lines_of_file, parse_document
from service.formats.faults import nearest_path, path_of
from service.formats.result_form import ResultForm
from service.node.jobs import Jobs, JobView
from service.node.node import Node, open_node
from service.node.results import result_pieces
from service.store import job_rows
from workers.spec import WorkerSpec

STORE_FOLDER: Final = ".roundhouse"
FOR_EVER_S: Final = 3e9  # 95 years, so that a job file stays the same job on its output
LOOK_INTERVAL_S: Final = 0.25  # time between shows of progress, and longest wait of an ended conversation for its file


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """One job file that is valid for the configuration."""

    source: str
    document: object
    spec: JobSpec
    job: Job


def read_job_file(source: str, text: str, config: Config, model: str | None = None) -> JobFile:
    """Return the job that a YAML or JSON text describes; ``model`` replaces the model of all its agents.

    Raises:
        ConfigError: with every fault, each with its line where known.
    """
    document, lines = parse_document(text, source)
    read = with_rows_of(document, source, lines)
    document = document if read is None else read.document
    refuse_configuration(document, source)
    rules = rules_of(config)
    try:
        posted = read_spec(document, rules.limits)
        spec = posted if model is None else spoken_with(posted, model)
        job = make_job(spec, JobId(source), rules)
    except InvalidJob as error:
        raise ConfigError(told_with_lines(error.faults, source, lines_of_file(text, lines), read)) from error
    if spec is not posted and isinstance(document, dict):
        document = rewritten(document, posted, spec)
    return JobFile(source=source, document=document, spec=spec, job=job)


def refuse_configuration(document: object, source: str) -> None:
    """Refuse a configuration that is given in place of a job.

    Raises:
        ConfigError: it is one.
    """
    if isinstance(document, dict) and "models" in document and "agents" not in document:
        raise ConfigError(f"{source}: this looks like a configuration; a job has agents and conversations")


def with_models_of(config: Config, jobs: Iterable[Job]) -> Config:
    """Return a configuration without unused models, which need not be there for a run."""
    adapters = rules_of(config).adapters
    used = {adapters.get(name, name) for job in jobs for name in job.models}
    return config.model_copy(update={"models": {name: each for name, each in config.models.items() if name in used}})


def refuse_shape(document: object, source: str, lines: Mapping[Place, int]) -> None:
    """Refuse a job with unknown fields or wrong types; a service may still refuse one that passes.

    Raises:
        ConfigError: with every such fault, each with its line where known.
    """
    try:
        spec_of(document)
    except InvalidJob as error:
        raise ConfigError(told_with_lines(error.faults, source, lines, None)) from error


def told_with_lines(faults: Iterable[Fault], source: str, lines: Mapping[Place, int], read: ReadJob | None) -> str:
    """Return one line per fault of a job, each after its file and, where known, its line there."""
    places = {path_of(place): place for place in lines}

    def line(fault: Fault) -> str:
        return source + line_of(lines, places.get(nearest_path(fault.path, places), ()))

    return "\n".join(f"{(read and read.place_of(fault.path)) or line(fault)}: {fault}" for fault in faults)


def with_rows_of(document: object, source: str, lines: Mapping[Place, int]) -> ReadJob | None:
    """Return a job's document with the conversations of a file that it names; None if it is not a mapping.

    ``lines`` has the lines of its keys.

    Raises:
        ConfigError: with every fault of that file, each with its line.
    """
    if not isinstance(document, dict):
        return None
    try:
        return with_rows(document, Path(source).parent, source)
    except JobFileInvalid as error:
        raise ConfigError("\n".join(_with_line(fault, source, lines) for fault in error.faults)) from error


def _with_line(fault: str, source: str, lines: Mapping[Place, int]) -> str:
    """Return a fault with the line of the job file's key that it names, if any."""
    place, colon, rest = fault.removeprefix(f"{source}: ").partition(":")
    if not fault.startswith(f"{source}: conversations") or not colon:
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

    With a ``form`` each job's result is written to a file beside its transcripts.

    Raises:
        ConfigError: two jobs would write to the same folder.
        StartFailed: an engine could not be started, or all engines of a model have given up.
        StoreError: the output folder is in use or cannot be written.
    """
    folders = [folder_for(output, file.job.name) for file in files]
    for index, folder in enumerate(folders):
        if folder in folders[:index]:
            raise ConfigError(f"{files[index].source}: name: another job is named {files[index].job.name!r} as well")
    # The store is always a database beside the transcripts, whatever the configuration says.
    kept = config.store.model_copy(update={"url": "sqlite", "keep_keys_s": FOR_EVER_S})
    own = config.model_copy(update={"store": kept})
    async with open_node(own, specs, output / STORE_FOLDER) as node:
        for file, folder in zip(files, folders, strict=True):
            await _check_owner(node, file, folder)
        await node.fleet.wait_ready(first_try_only=True)
        await node.catalog.wait_settled()
        posted = {
            await _post(node, file, output): (Export(folder), digest_of(file.document))
            for file, folder in zip(files, folders, strict=True)
        }
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.keep_halves)
            tasks.start_soon(node.callers.run)  # not the intake: other interrupted jobs on this output are left alone
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
        ConfigError: it does; only its user may delete them.
    """
    owner = await anyio.to_thread.run_sync(lambda: Export(folder).owner)
    known = await node.store.read(job_rows.by_key, _key(file), digest_of(file.document), datetime.now(UTC))
    if owner is not None and (known is None or known.id != owner):
        raise ConfigError(
            f"{file.source}: {folder} holds the transcripts of another job named {file.job.name!r}, or of this one "
            "before it was changed; give --output another folder, or remove that one"
        )


def _key(file: JobFile) -> str:
    return f"run:{file.job.name}:{digest_of(file.document)}"


def _named_sources(spec: JobSpec, output: Path) -> list[str]:
    """Return hints for ``from`` entries that name a job by its name in place of its id."""
    names = dict.fromkeys(each.source.job for each in spec.conversations if each.source is not None)
    owners = {name: Export(output / name).owner for name in names if "/" not in name and (output / name).is_dir()}
    return [f"the id of the job named {name!r} is {owner}" for name, owner in owners.items() if owner is not None]


async def _post(node: Node, file: JobFile, output: Path) -> JobId:
    # The same file on the same output is the same job: an ended one is only exported again, another continues.
    try:
        stored, is_new = await node.door.post(file.document, _key(file))
    except InvalidJob as error:  # faults that need the store: the sources of forks
        raise ConfigError("\n".join(f"{file.source}: {fault}" for fault in error.faults)) from error
    except (JobNotFound, ConversationNotFound) as error:
        named = await anyio.to_thread.run_sync(_named_sources, file.spec, output)
        raise ConfigError("\n".join([f"{file.source}: from: {error}", *named])) from error
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
    """Write newly ended conversations, off the event loop."""
    job_id = view.stored.id
    fresh = [name for name in await jobs.ended_conversations(job_id) if name not in export]
    if fresh or (view.stored.state in ENDED_JOBS and export.job_state != view.stored.state):
        transcripts = [await jobs.transcript(job_id, name) for name in fresh]
        given_up = [each.document for each in await jobs.given_up(job_id)]
        manifest = {**_manifest(view, file_hash), "given_up": given_up}
        await anyio.to_thread.run_sync(export.write, manifest, transcripts)


def result_file(form: ResultForm) -> str:
    """Return the name of a job's result file."""
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
    """Return the final state of a file's job with transcripts in ``output``; None if it has not ended."""
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
