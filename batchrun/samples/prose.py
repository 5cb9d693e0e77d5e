"""Plausible English out of word lists: the same seed gives the same text, on every machine.

Sentences, made-up documentation of web tools in the JSON form of function-calling prompts, and the
4 MB of text on which the tiny model's tokenizer is trained. Nothing here comes from a third party.
A `random.Random` is handed in; its stream is stable between Python versions. The order of the word
lists matters: earlier words are used more often.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TypeVar

_Item = TypeVar("_Item")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    """
    year time people city river bridge house school work day state number group company
    place water government country family market system program question night point home
    story fact month book village station street teacher child report team office road
    harbour garden library council letter museum festival winter summer machine history
    result level order paper project service member music party meeting plan morning force
    study law door health art war area field table voice minute policy process body mind
    price effect course train engine island forest mountain valley coast tower hall church
    castle farm mill factory workshop railway canal port ship boat captain crew passenger
    cargo storm wind rain snow light fire smoke stone wood iron glass copper paint cloth
    wool cotton leather bread grain apple orchard vineyard cattle sheep horse bird fish
    season harvest festival holiday ceremony anniversary exhibition painting sculpture
    portrait photograph camera film theatre stage actor audience song instrument orchestra
    concert poem poet novel author writer editor publisher newspaper magazine article
    chapter page map atlas compass journey expedition traveller guide visitor guest host
    hotel kitchen window roof wall floor staircase cellar attic courtyard fountain statue
    monument cemetery hospital doctor nurse patient medicine treatment disease laboratory
    experiment theory method measurement instrument telescope planet star comet satellite
    rocket signal message telegraph telephone radio network computer software database
    record archive catalogue inventory ledger account budget tax loan bank merchant trader
    customer supplier contract agreement treaty negotiation dispute court judge lawyer
    witness trial verdict prison police officer soldier army regiment campaign battle siege
    peace election vote candidate minister president parliament committee assembly
    delegate mayor citizen resident neighbour colleague partner manager director engineer
    architect builder carpenter mason painter designer inventor scientist professor student
    pupil lecture lesson examination degree university academy institute society
    association union movement strike protest speech debate argument opinion belief
    tradition custom legend ritual language dialect translation alphabet manuscript
    inscription document evidence witness estimate survey census population migration
    settlement region province district border frontier road tunnel dam reservoir pipeline
    cable turbine battery furnace boiler pump valve gear wheel axle hull mast sail anchor
    rope net basket barrel crate bottle lamp candle mirror clock watch bell key lock chain
    """
)

VERBS = _words(
    """
    open start move turn look ask work call show need want help play follow learn change
    watch offer consider remember return explain develop carry reach remain suggest raise
    pass report decide pull describe create publish design improve protect repair replace
    restore discover explore examine measure record collect compare prepare present deliver
    finish support accept believe cover enter establish mention notice observe paint
    perform produce protest question receive reject remove request require reserve reveal
    review settle share sign store study survey test trade train travel visit vote warn
    wash weigh welcome abandon absorb announce appoint approach approve arrange attach
    attack attempt attend avoid borrow calculate cancel capture celebrate challenge clean
    climb combine command complete connect conserve construct consult contain convert
    convince criticise defend demand demolish deny depart deposit destroy divide document
    donate dismiss employ enable encourage enlarge escape estimate evaluate exchange
    exhibit expand export express extend finance fund gather govern handle harvest house
    identify illustrate import include inform inherit inspect install introduce invent
    invest invite isolate join launch limit link load locate maintain manage mark name
    negotiate number organise oversee own pack persuade photograph polish postpone praise
    predict preserve process promise promote propose purchase quote recover reduce refuse
    register relocate rescue resist resolve restrict retire reward sample select separate
    """
)

ADJECTIVES = _words(
    """
    new old small large great long little early young public local important different
    second third late general second main full single special certain clear recent strong
    possible whole free simple common poor natural similar short final central dark cold
    warm quiet narrow wide deep heavy light bright empty ancient modern famous popular
    northern southern eastern western coastal rural urban royal national foreign private
    wooden golden silver green blue white black red broken careful cheap complex curious
    damaged dangerous detailed distant dusty elegant entire equal expensive fertile flat
    fragile frequent fresh frozen generous gentle gradual grateful harsh hidden historic
    hollow humble industrial informal invisible isolated joint junior keen lengthy lively
    lonely loyal magnetic mechanical medieval mild minor mobile moderate muddy mysterious
    neutral noisy obvious official ordinary original painful partial patient peaceful
    permanent pleasant polite portable powerful practical precious precise previous proud
    rapid rare reliable remarkable remote rich rough rusty scientific secret senior serious
    severe sharp silent skilled slow smooth solid steady steep strange strict sudden
    suitable tall temporary tense thick thin thorough tidy tiny tired tough traditional
    typical uncertain unusual useful vacant valuable vast vertical visible vivid weak
    """
)

ADVERBS = _words(
    """
    also often never soon later again almost already once perhaps slowly quickly quietly
    carefully finally mostly usually sometimes rarely suddenly openly barely briefly
    gradually entirely largely nearly partly simply easily firmly freely gladly heavily
    loosely proudly sharply steadily strongly widely eventually officially originally
    """
)

PREPOSITIONS = _words("in near behind beyond above below beside across under around")

NAME_STARTS = _words("Al An Be Bran Cor Dal El Fen Gar Hal Is Jor Kel Lor Mar Nor Or Pel")
NAME_MIDDLES = _words("a be di en ga i la mo na or ra sa ti u ve")
PERSON_ENDS = _words("ba da la lo na nne ra ric ris sa sen ta than via")
PLACE_ENDS = _words("bridge burg dale field ford gate ham mere mouth port stead ton wick")

COUNTED = _words("metres years workers visitors pages miles tonnes houses members boats")

COMMON = _words(
    """
    the of and to in a is was for on that by with as it at from his be he which an this are
    had not her or but they have their were has she one been who its all you would when we
    there will more if no out so said what about into than them can only some could these
    two may other then do first any my now such like our over me even most after made also
    did many before must through back where much your way down should because each just
    those how too good very make still own see men work long get here between both being
    under him himself take day same another know while last might us since against go came
    right used think went say use three came himself off few until without again home
    around small however found thought end left men something put saw always during part
    four began himself toward every told better things set got called don't never five
    asked nothing given going felt being give done far kept among yet enough gave knew
    taken held several become making themselves across kind often brought having second
    eyes face head hand though whether six later best nearly hundred thousand million
    early above upon less almost anything brought coming known really certain against
    themselves taking behind seven eight nine ten full seen including within according
    although both became followed led received led won lost run born died married son
    daughter father mother brother sister wife husband king queen lord sir mr mrs dr
    police political economic military social national international american british
    french german spanish russian chinese european english united states kingdom
    republic congress senate party prime minister president government policy security
    january february march april may june july august september october november december
    monday friday sunday century decade percent per cent total average number rate
    increase population production development education information university
    department organization administration relationship international communication
    experience understanding different important possible available especially
    significant responsible professional traditional environment management community
    building construction architecture design restaurant hotel castle hospital
    i'm it's that's didn't can't won't couldn't you're they're i'll we'll okay yes no oh
    hey please thank sorry love look walk turn smile stare sit stand talk hear feel look
    """
)

SENTENCES = (
    "The {adj} {noun} {past} the {noun} {prep} the {adj} {noun}.",
    "It was not the {noun} but the {noun} that {past} the {adj} {nouns} of the {noun}.",
    "Who would {verb} a {noun} that has {past} every {noun} {prep} the {noun}?",
    "If the {nouns} do not {verb} the {noun}, then all of them will {verb} some other {noun}.",
    "{person} {past} the {noun} because the {nouns} were too {adj} for the {noun}.",
    "According to {person}, the {noun} should {verb} the {nouns} before the {noun} is {past}.",
    "Most of the {nouns} had {adverb} been {past} when the {adj} {noun} came to {place}.",
    "While the {nouns} {past} the {noun}, {person} wrote that the {noun} was {adj}.",
    "After {number} {counted}, the {adj} {noun} was {past} and the {nouns} went home.",
    "The {noun} and its {nouns} are still {adj}, although they have been {past} since {year}.",
    "She {past} them {adverb}; he had {past} his {noun} for more than {number} {counted}.",
    "This {noun} is one of the {adj} {nouns} that the {noun} from {place} could {verb}.",
    "They were {ing} {prep} the {noun} with about {number} {counted} of {adj} {nouns}.",
    '"We have {past} what you {past}," said {person}, "but there is only one {adj} {noun}."',
    "For many {nouns} it can be {adj} to {verb} more than {number} {nouns} at the same time.",
    "There were {number} {counted} between the {noun} and the {adj} {noun} at {place}.",
    "In {year} the {noun} of {place} {past} a {adj} {noun}, and {person} {past} it {adverb}.",
    "Both {person} and {person} {past} to {verb} the {noun}, which cost {number} {counted}.",
)


def skewed(rng: Random, items: tuple[_Item, ...]) -> _Item:
    """One item, the first ones more often, as words are used in a language."""
    return items[int(len(items) * rng.random() ** 3)]


@cache
def past_tense(verb: str) -> str:
    """The past tense of a regular verb."""
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + "ed"


@cache
def ing_form(verb: str) -> str:
    """The present participle of a regular verb."""
    ends_in_silent_e = verb.endswith("e") and not verb.endswith("ee")
    return (verb[:-1] if ends_in_silent_e else verb) + "ing"


@cache
def plural(noun: str) -> str:
    """The plural of a regular noun."""
    if noun in {"people", "sheep", "fish", "cattle", "police", "software", "evidence", "music"}:
        return noun
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def person_name(rng: Random) -> str:
    """A made-up first and last name."""
    first = skewed(rng, NAME_STARTS) + skewed(rng, PERSON_ENDS)
    last = skewed(rng, NAME_STARTS) + skewed(rng, NAME_MIDDLES)
    return f"{first} {last}{skewed(rng, PERSON_ENDS)}"


def place_name(rng: Random) -> str:
    """A made-up place."""
    start = skewed(rng, NAME_STARTS) + skewed(rng, NAME_MIDDLES)
    return start + skewed(rng, PLACE_ENDS)


SLOTS: dict[str, Callable[[Random], str]] = {
    "noun": lambda rng: skewed(rng, NOUNS),
    "nouns": lambda rng: plural(skewed(rng, NOUNS)),
    "adj": lambda rng: skewed(rng, ADJECTIVES),
    "verb": lambda rng: skewed(rng, VERBS),
    "past": lambda rng: past_tense(skewed(rng, VERBS)),
    "ing": lambda rng: ing_form(skewed(rng, VERBS)),
    "adverb": lambda rng: skewed(rng, ADVERBS),
    "prep": lambda rng: rng.choice(PREPOSITIONS),
    "person": person_name,
    "place": place_name,
    "counted": lambda rng: rng.choice(COUNTED),
    "year": lambda rng: str(rng.randint(1620, 2020)),
    "number": lambda rng: str(rng.randint(2, 900)),
}
"""What fills a slot of a template."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Every look-up draws a fresh word."""

    rng: Random

    def __getitem__(self, slot: str) -> str:
        return SLOTS[slot](self.rng)


def fill(template: str, rng: Random) -> str:
    """`template` with a fresh word in every `{slot}`; an unknown slot is a KeyError."""
    return template.format_map(_Drawn(rng))


def sentence(rng: Random) -> str:
    """One sentence, of about 19"""
    return fill(skewed(rng, SENTENCES), rng)


def sentence_pool(rng: Random, num_sentences: int) -> list[str]:
    """Sentences to build long texts from quickly (about 30,000 a second)."""
    return [sentence(rng) for _ in range(num_sentences)]


DESCRIPTIONS = (
    "Find every {noun} that was {past} {prep} the {adj} {noun}.",
    "Return the {adj} {noun} of a {noun}, with its {nouns} and the {noun} they belong to.",
    "Search the {nouns} by {noun}; at most {number} {counted} are listed.",
    "Use this to {verb} a {noun}. It does not {verb} the {adj} {nouns}.",
    "Get the {noun} and all {nouns} for the given {noun}, sorted by {noun}.",
)
TYPES = ("string", "string", "number", "boolean")


def _parameter(rng: Random) -> dict[str, str]:
    return {
        "type": rng.choice(TYPES),
        "description": fill(rng.choice(DESCRIPTIONS), rng),
        "example_value": skewed(rng, NOUNS),
    }


def tool_json(rng: Random) -> str:
    """One function as JSON: name, description, parameters; about 190 tokens."""
    topic = f"{skewed(rng, ADJECTIVES)}_{skewed(rng, NOUNS)}"
    names = [skewed(rng, NOUNS) for _ in range(rng.randint(1, 4))]
    return json.dumps({
        "name": f"{skewed(rng, VERBS)}_{skewed(rng, NOUNS)}_for_{topic}",
        "description": fill(rng.choice(DESCRIPTIONS), rng),
        "parameters": {
            "type": "object",
            "properties": {name: _parameter(rng) for name in names},
            "required": names[:1],
        },
    })


SEED = 1
NUM_SENTENCE_PAIRS = 18_000
NUM_TOOLS = 1_000
NUM_COMMON_LINES = 4_000
NUM_LAYOUT_LINES = 1_500
ENDINGS = ("", "", "", "", "s", "er", "ness", "ment", "al", "ation", "ly", "ity")


def tokenizer_corpus() -> Iterator[str]:
    """Prose, tool documentation, common words, and the odd layouts of real documents."""
    rng = Random(SEED)
    yield from (f"{sentence(rng)} {sentence(rng)}" for _ in range(NUM_SENTENCE_PAIRS))
    yield from (tool_json(rng) for _ in range(NUM_TOOLS))
    for _ in range(NUM_COMMON_LINES):
        yield " ".join(skewed(rng, COMMON) for _ in range(16))
    forms = _word_forms()
    for _ in range(NUM_LAYOUT_LINES):
        yield _script_line(rng, forms)
        yield _derived_line(rng, forms)


def _word_forms() -> tuple[str, ...]:
    verbs = VERBS
    inflected = (*map(plural, NOUNS), *map(past_tense, verbs), *map(ing_form, verbs))
    return (*COMMON, *NOUNS, *verbs, *ADJECTIVES, *ADVERBS, *inflected)


def _script_line(rng: Random, forms: tuple[str, ...]) -> str:
    """Runs of spaces, capitals and typographic marks, as in a screenplay."""
    gap, indent = " " * rng.choice((1, 2, 4, 8, 12, 16, 24)), " " * rng.randint(1, 40)
    loud, word = rng.choice(forms).upper(), rng.choice(forms).capitalize()
    return f"{gap}\n{indent}{loud} {word}\n\n\u201c{word}\u201d she\u2019s \u2013 it\u2019s\u2014\n"


def _derived_line(rng: Random, forms: tuple[str, ...]) -> str:
    """Derived words, numbers and brackets, as in an article."""
    derived = " ".join(rng.choice(forms) + rng.choice(ENDINGS) for _ in range(8))
    return f"{derived} {rng.randint(1, 2500)}, ({rng.choice(forms)})."
