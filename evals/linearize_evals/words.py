"""The words that documents are made of: nouns for keys, phrases for filler sentences."""

from __future__ import annotations

import random
from typing import Any

from linearize.errors import UsageError

NOUNS = tuple(
    """
    actor agent album angle animal apple arm army arrow artist author autumn baby back bag ball band bank bar base
    basket bath battery beach bean bear bed bee beer bell belt bench bird block blood board boat body bone book border
    bottle bowl box boy brain branch brand bread breath brick bridge brother brush bubble bucket building bullet bus
    bush butter button cabin cable cake camera camp canal candle candy capital captain car card carpet cart case castle
    cat cave cell center chain chair chapter cheese chef chest chicken chief child church circle citizen city class clay
    client cliff clock cloth cloud club coach coal coast coat coffee coin collar college column comet computer cook
    copper corn corner cotton country court cousin cow cream crew crop cross crowd crown culture cup curtain curve
    customer dad dance daughter dawn day deck deer desert desk device diamond dinner dish doctor dog doll dollar door
    dragon drawer dream dress drink driver drum duck dust eagle ear earth edge egg elbow empire engine evening expert
    eye fabric face factory family fan farm farmer father feather fence fiber field figure film finger fire fish flag
    flame flash flat floor flower fly folder food foot forest fork fossil frame friend frog front fruit fuel game garage
    garden gas gate giant gift girl glass globe glove goat gold grain grandfather grape grass gravity group guard guest
    guide guitar gun habit hair hall hammer hand harbor hat head heart heat hero hill history hole holiday home honey
    horn horse hospital hotel hour house husband ice idea image inch index insect iron island jacket jar jet job joke
    journal journey judge juice jungle jury key king kitchen kite knee knife knight knot label ladder lady lake lamb
    lamp land language laser lawyer leader leaf leather leg lemon lens lesson letter library lid life light line lion
    lip list loan lock log lunch lung machine magazine mail man map market master match meal meat medal melody member
    memory message metal meter mile milk mind mine minute mirror model moment money monkey month moon morning mother
    motor mountain mouse mouth movie mud muscle museum music nail name neck needle nephew nest net network news night
    noise nose note novel number nurse nut oak ocean office oil onion orange orbit orchestra organ oven owner ox oxygen
    page paint palace palm pan panel paper parent park partner party path patient pattern pen pencil people pepper
    person phone photo piano picture pie piece pig pillow pilot pin pipe pizza place plane planet plant plastic plate
    platform player pocket poem poet point pole pond pool port post pot potato powder prince princess printer prison
    prize problem product professor profit project prophet queen rabbit radio rail rain ranch rat record reef rib rice
    ring river road robot rock rocket roof room root rope rose route ruler sail salad salt sand scale scene school
    science screen sea seat secretary seed shadow shape shark sheep sheet shell ship shirt shoe shop shore shoulder sign
    signal silk silver singer sister skin skirt sky smile smoke snail snake snow soap soil soldier son song soul soup
    space speaker spider spirit sport spring square stage stair star state station statue steam steel stem step stick
    stone store storm story stream street string student sugar suit summer sun surface surgeon switch sword symbol
    system table tail tank tape target tea teacher team tent test text theater theory thread throat ticket tide tiger
    tile timber tin tire title tool tooth top tower town toy track trade train tray treaty tree triangle tribe truck
    trunk tube tunnel turtle uncle valley vase vehicle vessel victim video village violin virus visitor voice volcano
    wagon wall war wave weather web week whale wheat wheel wife wind window wine wing winter wire wolf woman wood wool
    word worker world worm writer yard year zone
    """.split()  # noqa: SIM905
)
SUBJECTS = (
    "The old man", "A young woman", "My neighbor", "The teacher", "Our guide", "The farmer", "A tall boy", "The baker",
    "Her brother", "His aunt", "The new doctor", "A quiet girl", "The captain", "Our cousin", "The gardener",
    "A tired driver", "The painter", "My grandmother", "The young cook", "A visitor", "The mayor", "Their daughter",
    "The carpenter", "A student", "The postman", "Our teacher", "The shepherd", "A sailor", "The clerk", "My friend",
    "The singer", "A stranger",
)  # fmt: skip
VERBS = (
    "walked past", "looked at", "talked about", "painted", "remembered", "drew a map of", "asked about", "wrote about",
    "pointed at", "went around", "dreamed of", "told us about", "took a picture of", "waited near", "sat beside",
    "smiled at", "forgot about", "read about", "heard about", "cleaned", "visited", "described", "worked near",
    "came back to", "stood before", "passed by", "thought about", "stopped at", "ran toward", "cared for", "searched",
    "liked",
)  # fmt: skip
OBJECTS = (
    "the river", "a small house", "the morning market", "a quiet street", "the green hills", "a wooden boat",
    "the old mill", "a stone wall", "the apple trees", "a narrow path", "the empty field", "a red barn",
    "the long road", "a broken fence", "the village well", "a blue door", "the tall tower", "a row of houses",
    "the open window",
    "a flock of birds", "the wet grass", "a pile of leaves", "the little shop", "a pair of boots", "the deep lake",
    "a basket of fruit", "the white horse", "a heavy cart", "the busy square", "a warm kitchen", "the rose bushes",
    "a sleeping dog",
)  # fmt: skip
TAILS = (
    "before lunch", "in the rain", "on a warm day", "without a word", "every Sunday", "after the long winter",
    "late in the evening", "with great care", "for the first time", "on the way home", "at the end of the week",
    "in the early morning", "while the others slept", "for almost an hour", "as the sun went down", "with a smile",
    "again and again", "during the holidays", "until it was dark", "just before the storm", "without any hurry",
    "in the middle of June",
)  # fmt: skip
NOISE = (
    "The sky is clear and the road is dry.",
    "People come and people go.",
    "The hours pass, one after another.",
    "Nothing much happens here.",
    "Then the day begins again.",
)


def sentence(rng: random.Random) -> str:
    """One of some 700,000 filler sentences."""
    return " ".join(rng.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, TAILS)) + "."


def numbers(rng: random.Random, count: int, digits: int) -> list[str]:
    """`count` different numbers, without leading zeros."""
    return [str(number) for number in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


class Nouns:
    """The nouns, those first that are one token for a tokenizer, so that a key is a single thing to look up.

    Args:
        tokenizer: any tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        def tokens(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False)["input_ids"])

        line = tokens("\n")
        inside = [noun for noun in NOUNS if tokens(f" {noun}") == 1]
        both = [noun for noun in inside if tokens(f"\n{noun}") == line + 1]
        self.pools = (both, inside, NOUNS)

    def draw(self, rng: random.Random, count: int) -> list[str]:
        """`count` different nouns, from the smallest pool that has enough.

        Raises:
            UsageError: there are not so many nouns.
        """
        for pool in self.pools:
            if len(pool) >= count:
                return rng.sample(pool, count)
        raise UsageError(f"{count} different nouns are needed, of {len(NOUNS)} known", "Ask for fewer pairs")
