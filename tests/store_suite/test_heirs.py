"""Conversations that begin with others' turns, as every store keeps them (specification, "Begun from a record")."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from service.config.schema import StoreConfig
from service.conversations.job.job import Heritage, Job, JobId
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.record.heritage import Share
from service.conversations.record.transcript import Origin, Turn
from service.errors import JobNotFound, NotEnded
from service.node.retention import release
from service.store import conversation_rows, heirs, job_rows
from service.store.databases.database import FEW
from service.store.records import NewJob
from service.store.store import Store
from tests.harness.jobs import DEBATE, agent, job
from tests.harness.stored import NOW, J, append, ended, moved, new, post, turn

HEIR = JobId("heir")


def inheriting(made: Job, *agents: str, source: JobId = J, rounds: int = 1) -> NewJob:
    """Return a job whose first conversation inherits rounds of these agents."""
    heritage = Heritage(source=(source, "c0"), ends=dict.fromkeys(agents, rounds), first={}, turns=len(agents))
    (talk,) = made.conversations
    made = replace(made, conversations=(replace(talk, heritage=heritage),))
    shares = [Share(job=source, conversation="c0", agent=name, rounds=rounds) for name in agents]
    return replace(new(made), shares={talk.id: shares})


async def record(store: Store, *names: str, owner: str | None = None) -> None:
    """Store an ended job in which these agents have spoken."""
    await post(store, replace(job(*DEBATE), owner=owner))
    await append(store, *(ended(name, text=name) for name in names), moved(ConversationState.COMPLETED))


async def inherited(store: Store, job_id: JobId = HEIR) -> list[Turn]:
    return await store.read(heirs.inherited, job_id, ["c0"])


async def heir(store: Store, *names: str, name: str = "heir", owner: str | None = None, source: JobId = J) -> None:
    await store.post(inheriting(replace(job(agent("a"), name=name), owner=owner), *names, source=source), claims=True)


async def test_inherited_turns_refer_to_where_they_were_spoken(store: Store) -> None:
    """In order of speaking; a transcript begins with them, and names their conversation."""
    await record(store, "b", "a")
    await heir(store, "a", "b")
    assert [(each.key.agent_id, each.text) for each in await inherited(store)] == [("b", "b"), ("a", "a")]
    record_of = await store.read(conversation_rows.record, HEIR, "c0")
    assert {each.inherited for each in record_of.turns} == {Origin(job=J, conversation="c0")}
    assert [each.key[:2] for each in record_of.turns] == [(HEIR, "c0")] * 2
    assert (await store.read(conversation_rows.record, HEIR, "c0", 1)).turns == record_of.turns[1:]
    assert (await store.read(job_rows.tally, HEIR)).turns == {}
    assert (await store.read(heirs.heritages, HEIR, ["c0"]))["c0"].ends == {"a": 1, "b": 1}


async def test_heirs_of_one_job_share_the_turns_that_are_read(store: Store) -> None:
    """A thousand conversations that begin alike hold each turn once, also after a restart."""
    await record(store, "a", "b")
    one = inheriting(job(agent("a"), name="heir"), "a", "b")
    (talk,) = one.job.conversations
    names = [f"c{number}" for number in range(FEW + 1)]
    talks = tuple(replace(talk, id=name) for name in names)
    shares = {name: one.shares[talk.id][: 1 + number % 2] for number, name in enumerate(names)}
    await store.post(replace(one, job=replace(one.job, conversations=talks), shares=shares), claims=True)
    for wanted in (names, names[:2]):
        turns = await store.read(heirs.inherited, HEIR, wanted)
        told = {name: [each.text for each in turns if each.key.conversation_id == name] for name in wanted}
        assert told == {name: ["a", "b"][: 1 + number % 2] for number, name in enumerate(wanted)}
        assert len({id(each.attempts) for each in turns}) == 2


async def test_interrupted_turns_are_not_inherited(store: Store) -> None:
    """They were never said."""
    await post(store, job(*DEBATE))
    cut = replace(ended("b"), turn=turn("b", TurnState.CANCELLED))
    await append(store, ended("a"), cut, moved(ConversationState.FAILED))
    await heir(store, "a", "b")
    assert [each.key.agent_id for each in await inherited(store)] == ["a"]


async def test_a_deleted_source_is_kept_for_its_heirs(store: Store) -> None:
    """As much as they inherited, and until the last of them is gone."""
    await record(store, "a", "b")
    await heir(store, "a")
    before = await inherited(store)
    await store.delete(J)
    assert await inherited(store) == before
    assert await count_kept(store) == 1
    await heir(store, "a", name="second", source=HEIR)
    await store.write(lambda connection: connection.execute("UPDATE heirs SET source_job = 'j'"))  # as its shares do
    assert [each.text for each in await inherited(store, JobId("second"))] == ["a"]
    await append(
        store, moved(ConversationState.COMPLETED, name="heir"), moved(ConversationState.COMPLETED, name="second")
    )
    await store.delete(JobId("second"))
    await store.delete(HEIR)
    assert await count_kept(store) == 0


async def count_kept(store: Store) -> int:
    return await store.read(lambda connection: len(connection.execute("SELECT number FROM kept_turns").fetchall()))


async def test_a_source_that_expires_is_kept_for_its_heirs(store: Store) -> None:
    """For heirs of any key, since no owner asked for its deletion. A reused number is another turn."""
    await record(store, "a")
    await heir(store, "a")
    keep = StoreConfig(keep_jobs_s=1.0)
    assert await release(store, keep, NOW + timedelta(days=1)) == 1
    assert [each.text for each in await inherited(store)] == ["a"]
    later = JobId("later")
    await post(store, job(*DEBATE, name="later"))
    spoken = [
        replace(each, turn=replace(each.turn, key=each.turn.key._replace(job_id=later))) for each in (ended("a"),)
    ]
    await append(store, *spoken, moved(ConversationState.COMPLETED, name="later"))
    await heir(store, "a", name="second", source=later)
    await store.delete(later)
    assert len(await inherited(store, JobId("second"))) == 1
    await append(store, *(moved(ConversationState.COMPLETED, name=name) for name in ("heir", "second")))
    assert await release(store, keep, NOW + timedelta(days=1)) == 2
    assert await count_kept(store) == 0


async def test_heirs_are_deleted_with_their_source_on_request(store: Store) -> None:
    """Not before they have ended."""
    await record(store, "a")
    await heir(store, "a")
    with pytest.raises(NotEnded, match="heir"):
        await store.delete(J, with_heirs=True)
    await append(store, moved(ConversationState.COMPLETED, name="heir"))
    assert await store.delete(J, with_heirs=True) == []
    for gone in (J, HEIR):
        with pytest.raises(JobNotFound):
            await store.read(job_rows.job, gone)
    assert await count_kept(store) == 0


async def test_heirs_of_another_key_lose_deleted_turns(store: Store) -> None:
    """The source's owner deletes it; unfinished heirs are cancelled, since their prompts contain it."""
    await record(store, "a", owner="alice")
    await heir(store, "a", owner="root")
    assert await store.delete(J) == [HEIR]
    assert (await store.read(job_rows.job, HEIR)).is_cancel_requested
    assert await inherited(store) == []
    assert await count_kept(store) == 0


async def test_a_source_kept_for_one_key_goes_with_its_last_heir(store: Store) -> None:
    """Another key's heir loses it then: the owner has deleted both."""
    await record(store, "a", owner="alice")
    await heir(store, "a", owner="alice")
    await append(store, moved(ConversationState.COMPLETED, name="heir"))
    assert await store.delete(J) == []
    await heir(store, "a", name="other", owner="root", source=HEIR)
    await store.write(lambda connection: connection.execute("UPDATE heirs SET source_job = 'j'"))  # as its shares do
    other = JobId("other")
    assert len(await inherited(store, other)) == 1
    assert await store.delete(HEIR) == [other]
    assert await inherited(store, other) == []
    assert await count_kept(store) == 0


async def test_an_expired_heir_takes_nothing_from_heirs_of_other_keys(store: Store) -> None:
    """The last heir of the owner's key expired, which is no deletion: the others keep their turns."""
    await record(store, "a", owner="alice")
    await heir(store, "a", owner="alice")
    await append(store, moved(ConversationState.COMPLETED, name="heir"))
    await store.delete(J)
    for name in ("one", "two"):
        await heir(store, "a", name=name, owner="root", source=HEIR)
    await store.write(lambda connection: connection.execute("UPDATE heirs SET source_job = 'j'"))  # as its shares do
    await append(store, *(moved(ConversationState.COMPLETED, name=name) for name in ("one", "two")))
    await store.write(lambda connection: connection.execute("DELETE FROM jobs WHERE id = 'heir'"))
    assert await store.delete(JobId("one")) == []
    assert len(await inherited(store, JobId("two"))) == 1


async def test_turns_of_one_source_stand_before_those_of_the_next(store: Store) -> None:
    """Whatever their numbers: a database may reuse the number of a deleted turn."""
    await record(store, "a")
    await heir(store, "a")
    await store.delete(J)
    spoken = ended("b", text="b")
    spoken = replace(spoken, turn=replace(spoken.turn, key=spoken.turn.key._replace(job_id=HEIR, round=1)))
    await append(store, spoken, moved(ConversationState.COMPLETED, name="heir"))
    third = inheriting(job(agent("a"), name="third"), "a", source=HEIR)
    shares = [
        Share(job=J, conversation="c0", agent="a", rounds=1),
        Share(job=HEIR, conversation="c0", agent="b", rounds=2),
    ]
    await store.post(replace(third, shares={"c0": shares}), claims=True)
    assert [each.text for each in await inherited(store, JobId("third"))] == ["a", "b"]


async def test_a_source_that_was_just_deleted_refuses_its_heir(store: Store) -> None:
    """The source was read a moment before."""
    await record(store, "a")
    await store.delete(J)
    with pytest.raises(JobNotFound):
        await heir(store, "a")
    with pytest.raises(JobNotFound):
        await store.read(job_rows.job, HEIR)
