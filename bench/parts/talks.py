"""Two talks of three agents, written for this project, and the facts for a summary to keep (``bench.summaries``)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """Words of agents in turn; ``facts`` and answers are a word each, or alternatives.

    ``summary`` sums up the first two rounds, and answers all ``questions``.
    """

    prompt: str
    words: tuple[tuple[str, str], ...]
    facts: tuple[str, ...]
    summary: str
    questions: tuple[tuple[str, str], ...]


TALKS = (
    Talk(
        prompt="The village talks about its well, which has run dry.",
        words=(
            ("anna", "The well ran dry on Monday. My hens have had no water since."),
            ("bruno", "I measured it: the water is twelve metres down now. In spring it was four."),
            ("carla", "The mayor told me the old pump at the mill still works."),
            ("anna", "Then let us ask the mayor for the pump. I can bring my cart."),
            ("bruno", "My brother Peter is a smith. He can mend the pipe for thirty coins."),
            ("carla", "We have only twenty coins in the box. Who pays the other ten?"),
            ("anna", "I will give five coins, if Bruno gives five."),
            ("bruno", "Agreed, I give five. Peter can start on Thursday."),
            ("carla", "Good. Then we decide: the pump comes from the mill, and Peter mends it on Thursday."),
            ("anna", "What do we do until Thursday? The children are thirsty."),
            ("bruno", "We carry water from the river, each family two buckets a day."),
            ("carla", "Only if it is boiled. Last year the river made my son Luca sick."),
        ),
        facts=(
            "monday",
            "twelve|12",
            "pump",
            "mill",
            "mayor",
            "peter",
            "thirty|30",
            "thursday",
            "river",
            "bucket",
            "boil",
            "luca",
            "coins",
            "five",
        ),
        summary=(
            "anna: The well ran dry on Monday.\n"
            "bruno: The water is twelve metres down; in spring it was four.\n"
            "carla: The old pump at the mill still works.\n"
            "Peter the smith mends the pipe for thirty coins; there are twenty in the box.\n"
            "Open: who pays ten coins."
        ),
        questions=(
            ("On which day did the well run dry?", "monday"),
            ("How deep is the water now?", "twelve|12"),
            ("Where is the old pump?", "mill"),
            ("Who mends the pipe?", "peter|smith"),
            ("How many coins does the smith ask?", "thirty|30"),
        ),
    ),
    Talk(
        prompt="The three owners of a bakery talk about their week.",
        words=(
            ("anna", "Our shop sold 340 loaves this week, fewer than the 500 of last week."),
            ("bruno", "The oven broke on Tuesday. That is why."),
            ("carla", "Customers asked for rye bread again. We have none."),
            ("anna", "A new oven costs 8,000 euros. The bank offers a loan at six percent."),
            ("bruno", "I would rather repair it. Mr. Kovac asks 900 euros."),
            ("carla", "If Kovac repairs it by Friday, I am for it."),
            ("anna", "He promised Friday. So no loan: we repair."),
            ("bruno", "Good. And I bake rye bread from next week on, fifty loaves a day."),
            ("carla", "I write a sign for the window, so that everybody knows of the rye bread."),
            ("anna", "We still need flour. Our supplier in Brno raised the price by ten percent."),
            ("bruno", "My cousin Jana has a mill in Olomouc. She is cheaper."),
            ("carla", "Ask her today, please. That question is open."),
        ),
        facts=(
            "340",
            "500",
            "oven",
            "tuesday",
            "rye",
            "8,000|8000",
            "loan",
            "kovac",
            "900",
            "friday",
            "fifty|50",
            "sign|window",
            "brno",
            "jana|cousin",
            "flour",
        ),
        summary=(
            "anna: 340 loaves sold this week, 500 last week.\n"
            "bruno: The oven broke on Tuesday.\n"
            "carla: Customers ask for rye bread.\n"
            "A new oven costs 8,000 euros; Kovac repairs the old one for 900 euros.\n"
            "Open: repair or loan."
        ),
        questions=(
            ("How many loaves did we sell this week?", "340"),
            ("On which day did the oven break?", "tuesday"),
            ("What bread do customers ask for?", "rye"),
            ("What does a new oven cost?", "8,000|8000"),
            ("Who repairs the oven?", "kovac"),
        ),
    ),
)
