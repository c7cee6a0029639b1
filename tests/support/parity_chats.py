"""Twenty varied chats: languages, code, lists, conversations, long documents."""


def _user(text, system=None):
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": text}]


_CITIES = ["Lisbon", "Oslo", "Quito", "Hanoi", "Accra", "Turin", "Osaka", "Perth", "Lima", "Riga"]
_GOODS = ["copper pipes", "wool", "dried figs", "glass lenses", "paper", "tea", "cork", "salt"]


def _ledger(entries):
    """A trading house's ledger; every entry differs in day, place, goods and sum."""
    return "\n".join(
        f"Day {day}: shipped {3 + day * 7 % 23} crates of {_GOODS[day * 5 % len(_GOODS)]} to "
        f"{_CITIES[day * 3 % len(_CITIES)]} for {120 + day * 37 % 410} crowns."
        for day in range(1, entries + 1)
    )


def _survey(rows):
    header = "station,month,rain_mm,wind\n"
    return header + "\n".join(
        f"S{row % 9},{1 + row % 12},{row * 13 % 97}.{row % 10},{'NESW'[row % 4]}"
        for row in range(rows)
    )


_SORT = """def merge(left, right):
    merged = []
    while left and right:
        merged.append(left.pop(0) if left[0] <= right[0] else right.pop(0))
    return merged + left + right


def merge_sort(items):
    if len(items) < 2:
        return items
    middle = len(items) // 2
    return merge(merge_sort(items[:middle]), merge_sort(items[middle:]))
"""

_CONVERSATION = [
    {"role": "user", "content": "I have flour, eggs and milk. What can I cook?"},
    {"role": "assistant", "content": "You could make pancakes, crepes or a simple batter pudding."},
    {"role": "user", "content": "Crepes sound good. How long should the batter rest?"},
    {"role": "assistant", "content": "About thirty minutes in the refrigerator is enough."},
    {"role": "user", "content": "And what could I fill them with?"},
]

_FABLE = (
    "An old miller had a wheel that turned slower every year. He oiled the axle, he cleared the "
    "weeds from the race, and he scolded the river, but the wheel kept slowing. One evening a "
    "child who watched the water said that the stream had moved: it now ran behind the hill, and "
    "only what leaked through the stones still reached the mill. The miller laughed, then walked "
    "up the hill, and did not come back until dark. In the morning he began to dig."
)

CHATS = [
    _user("Hi", ""),
    _user("Is a tomato a fruit?"),
    _user("Write one sentence about the sea.", "You are terse."),
    _user("Explique en deux phrases pourquoi le ciel est bleu."),
    _user("토마토는 과일이야?", "짧게 답하세요."),
    _user("请用三句话介绍长城。"),
    _user("Nenne drei Flüsse in Deutschland und je eine Stadt, die an ihnen liegt."),
    _user("List ten uses of a paper clip, one per line, numbered."),
    _user(f"What does this program do, and what is its running time?\n\n```python\n{_SORT}```"),
    _user("Write a SQL query that gives the three customers with the most orders in 2023."),
    _user("Solve step by step: 17 * 23 - 4 * (9 + 12) / 7 = ?"),
    _CONVERSATION,
    _user(f"{_FABLE}\n\nWhat is the moral of this story?"),
    _user(f"Summarize:\n\n{_FABLE}\n\n{_FABLE.replace('miller', 'weaver')}", "Answer in a list."),
    _user('Turn into JSON: name Ada, born 1815, fields mathematics and computing; "alive": no.'),
    _user("Emoji only 🦊🌊: 👩‍👩‍👧‍👦 means family. What do 🌙✨ and 🏔️🚶 mean?"),
    _user(f"Which city received the most wool?\n\n{_ledger(9)}", "You audit ledgers."),
    _user(f"Find the rainiest month in this table:\n\n{_survey(20)}"),
    _user(f"Here is a ledger.\n\n{_ledger(25)}\n\nWrite a short report about it."),
    _user(f"Read all of it, then say what is unusual.\n\n{_ledger(61)}\n\nWhat is unusual?"),
]
