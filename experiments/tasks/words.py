"""What haystacks and needles are made of: words, numbers, UUIDs, a repeated noise sentence, English prose."""

import random
import re
import uuid
from functools import cache

from verkv.demo import prose_paragraphs

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

ADJECTIVES = """
    amber ancient arctic bashful bitter blank bold brave brief bright brisk broad calm careful cheap chilly clean clear
    clever cloudy coarse common cosy crisp cruel curly damp daring deep dense dim dizzy drowsy dry dusty eager early
    elastic elegant even exotic faint fair famous fancy fast fertile fierce firm flat fluffy foggy formal fragile frank
    fresh frosty gentle giant glad gloomy golden graceful grand greedy gritty happy harsh hasty heavy hollow honest
    humble hungry icy idle ivory jolly keen kind lazy lively lonely loud loyal lucid lucky mellow mild misty modest
    narrow neat nimble noble noisy odd olive pale patient plain polite proud purple quick quiet rapid rare rough round
    royal rustic rusty salty shallow sharp shiny shy silent silver slender slow smooth snowy sober soft solid spicy
    steady steep stiff strict sturdy subtle sunny sweet swift tall tame tender thick tidy timid tiny tough tranquil
    upbeat urban vague vast vivid warm wary weary wild windy wise witty wooden young
""".split()  # noqa: SIM905 - a literal list would take 360 lines

NOUNS = """
    acorn anchor apple apron arrow attic badge bakery balcony banjo barn barrel basin basket beacon beaver bell bench
    berry bicycle biscuit blanket bottle boulder bracket branch bridge bucket button cabin camel canal candle canoe
    canyon carpet castle cellar chapel cherry chimney circus clock cloud coffee comet compass copper coral cottage
    cradle crane cricket crystal curtain daisy desert dolphin donkey dragon drawer drum eagle easel elbow ember engine
    falcon feather fence ferry fiddle field flute forest fossil fountain garden garlic gate glacier glove goose granite
    grape gravel guitar hammer harbour harp hedge helmet hinge honey island jacket jungle kettle kitten ladder lagoon
    lantern lemon lizard lobster locket magnet mango maple marble market meadow mirror mitten monkey mountain mushroom
    napkin needle nest nugget oak oasis olive onion orchard orchid otter oven owl paddle painter palace parrot pasture
    peach pebble pencil pepper piano pigeon pillow pirate planet plough pocket pond poppy potato prairie puddle quarry
    quilt rabbit radish ribbon ridge river robin rocket saddle sailor salmon sandal scarf shelter shovel spider spoon
    squirrel stable statue stove summit temple thimble thistle ticket tiger tomato tower tractor trumpet tulip tunnel
    turtle umbrella valley velvet village violin wagon walnut whistle willow window winter wizard yacht
""".split()  # noqa: SIM905 - a literal list would take 360 lines


@cache
def single_words() -> tuple[str, ...]:
    """Distinct lower-case words: the lists above and those of Python's documentation, about 2,300, in random order."""
    text = " ".join(prose_paragraphs())
    words = sorted({*ADJECTIVES, *NOUNS, *re.findall(r"(?<![\w.`'\"-])[a-z]{4,12}(?=[ ,;.])", text)})
    random.Random(0).shuffle(words)
    return tuple(words)


@cache
def compounds() -> tuple[str, ...]:
    """Every adjective with every noun, about 32,000, in random order."""
    words = sorted(f"{a}-{n}" for a in ADJECTIVES for n in NOUNS)
    random.Random(0).shuffle(words)
    return tuple(words)


def distinct_words(rng: random.Random, n_words: int) -> list[str]:
    """`n_words` distinct words: single ones, and compounds where they run out.

    RULER draws from about 9,000 single words; those at hand are used up at about 32,000 tokens.
    """
    n_missing = max(0, n_words - len(single_words()))
    return rng.sample(single_words() + compounds()[:n_missing], n_words)


@cache
def prose_words() -> tuple[str, ...]:
    """The words of English prose: the language reference that every Python carries, in place of RULER's essays."""
    return tuple(" ".join(prose_paragraphs()).split())


def prose(n_words: int, start: int) -> list[str]:
    """Sentences of `n_words` words of prose in all, from word `start` on, from the beginning again where it ends."""
    words = prose_words()
    start %= len(words)
    repeats = (start + n_words) // len(words) + 1
    text = " ".join((words * repeats)[start : start + n_words])
    return re.split(r"(?<=[.!?])\s+", text)


def random_word(rng: random.Random) -> str:
    """An adjective and a noun, joined by a hyphen as RULER's are."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def random_number(rng: random.Random) -> str:
    """Seven digits."""
    return str(rng.randint(1_000_000, 9_999_999))


def random_uuid(rng: random.Random) -> str:
    """A UUID of version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def new_ones(draw, rng: random.Random, n: int, taken: set[str]) -> list[str]:
    """`n` draws that differ from one another and from `taken`, which they are added to."""
    found = []
    while len(found) < n:
        value = draw(rng)
        if value not in taken:
            taken.add(value)
            found.append(value)
    return found
