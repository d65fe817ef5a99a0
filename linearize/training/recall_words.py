"""The words of the recall documents: keys and values of several kinds, and filler sentences.

None of the keys and values is a noun of `linearize_evals.words`, and no phrase is one of its phrases: a model that is
trained on these documents has not seen the test's.
"""

from __future__ import annotations

import random
from collections.abc import Callable

ADJECTIVES = tuple(
    """
    able absent acid active actual aerial ageless agile airy alert alike aloof amber ample ancient angry anxious
    arid ashen atomic awake aware awful azure balmy bare basic bitter bizarre bland blank bleak blind blond blunt
    bold bouncy brave brief bright brisk brittle broad bronze bulky busy calm candid careful casual cautious cheap
    cheerful chilly civic clean clear clever coarse common complex compact concise coral cosmic costly cozy crafty
    creamy crimson crisp crooked crude cubic curious curly cyan daily damp dapper daring decent deep defiant dense
    dim direct distant dizzy docile dormant double drowsy dual dull dusky eager early earnest easy elastic elder
    elegant eminent empty endless equal erratic exact exotic extra faint fair famous fancy fatal feeble fertile
    festive fierce final firm fleet fluffy fluid foggy fond formal fragile frank fresh frosty frozen frugal fuzzy
    gentle genuine ghostly glad gleaming global gloomy glossy golden graceful grand grave gray greedy gritty groovy
    handy happy hardy harsh hasty hazel hazy hearty heavy hefty helpful hidden hollow honest huge humble humid
    hungry icy ideal idle immense indigo inert inner ivory jagged jolly jovial joyful jumbo junior keen kind large
    late lavender lavish lazy lean legal level lively lofty lonely loose loud lovely loyal lucid lucky lunar magenta
    magic major maroon mellow merry mighty mild minor misty modern modest moist mossy muddy mute narrow nasty native
    neat neutral nimble noble northern nutty obscure odd ornate outer oval pale peaceful perky plain pliant plump
    polite poor precise pretty prime proper proud puny purple quaint quick quiet radiant rapid rare raw ready regal
    remote rigid ripe robust rocky rough round royal rugged rural russet rustic sacred sandy scarce scarlet senior
    serene severe shabby shaggy shallow sharp shiny shrill shy simple sleek slender slim slippery sloppy slow smooth
    snug solar sober solemn solid sour southern spare sparse speedy spicy spry stable stale stark steady steep stern
    sticky stiff strange strict sturdy subtle sudden sunny superb supple sweet swift tall tame tart tasty teal
    tender tepid thick thin thorny tidy tight tiny tired torn tough tranquil trendy tricky trim twin ultra unique
    urban urgent useful usual vague valid vapid vast velvet verbal vexed vital vivid vocal wary weary weird western
    wicked wide wild wiry witty woody worthy woven wry young zany zealous
    """.split()  # noqa: SIM905
)
CREATURES = tuple(
    """
    aardvark alder alligator alpaca anemone ant anteater antelope armadillo aspen aster axolotl azalea baboon badger
    bamboo barnacle bat beaver beetle begonia bison boar bobcat buffalo bumblebee buttercup buzzard cactus camel
    canary capybara cardinal caribou carp caterpillar catfish cedar chameleon cheetah chestnut chinchilla chipmunk
    cicada clam clematis clover cobra cockatoo condor cormorant cougar coyote crab crane cricket crocodile crocus
    cuckoo cypress daffodil dahlia daisy dandelion dingo dolphin donkey dormouse dragonfly dugong eel egret elk elm
    emu ermine falcon fennel fern ferret finch firefly flamingo foxglove gazelle gecko geranium gerbil gibbon ginkgo
    giraffe gnat gopher gorilla goose grouse gull halibut hamster hare harrier hawk hawthorn hazel heather hedgehog
    heron herring hibiscus hippo holly hornet hyacinth hyena ibex ibis iguana impala iris ivy jackal jackdaw jaguar
    jasmine jellyfish juniper kangaroo kestrel kingfisher kiwi koala krill ladybug larch lark lavender lemur leopard
    lichen lilac lily lizard llama lobster locust lotus lupin lynx macaw magnolia magpie mallard mammoth manatee
    mandrill mantis maple marigold marmot marten meerkat mimosa mink minnow mole mongoose moose mosquito moss moth
    mulberry mussel narwhal nettle newt nightingale ocelot octopus okapi oleander opossum orangutan orca orchid
    osprey ostrich otter owl oyster pangolin panther parakeet parrot partridge peacock pelican penguin peony perch
    petrel petunia pheasant pigeon piranha platypus plover plum poppy porcupine porpoise primrose puffin puma python
    quail quokka raccoon raven reindeer rhino robin rowan salamander salmon sardine scorpion seal sequoia shrew
    shrimp skunk sloth snapdragon sparrow spruce squid squirrel starfish stingray stoat stork sturgeon sunflower
    swallow swan swift tapir tarantula termite thistle thrush toad toucan trout tulip tuna turkey vulture wallaby
    walnut walrus warbler wasp weasel willow wisteria wolverine wombat woodpecker wren yak yew zebra zinnia
    """.split()  # noqa: SIM905
)
FIRST_NAMES = tuple(
    """
    Aaron Abigail Adele Adrian Agnes Aisha Alan Albert Alejandro Alice Alma Amara Amelia Amir Anders Andrea Angela
    Anita Anna Anton Ariel Arjun Arthur Astrid Audrey Axel Barbara Beatrice Benjamin Bernard Bianca Boris Brenda
    Brian Bridget Bruno Camille Carl Carmen Caroline Cecilia Chidi Chloe Christine Clara Claude Colin Conrad Cyrus
    Dahlia Damian Daniel Daphne David Deborah Dennis Diana Diego Dmitri Dolores Dora Doris Edgar Edith Edmund Eileen
    Elena Elias Elise Emil Emma Enzo Erik Esther Ethan Eugene Eva Fatima Felix Fernando Fiona Florence Francis Frida
    Gabriel Gavin Georgia Gerald Gloria Gordon Greta Gunnar Gustav Hannah Harold Harriet Hassan Hector Heidi Helen
    Henrik Herbert Hiroshi Horace Hugo Ibrahim Ida Imani Ines Ingrid Irene Isaac Isabel Ivan Jacob Jamal Janet
    Jasper Javier Jerome Joanna Joel Johan Jonas Joseph Judith Julian Karen Karim Katrin Keiko Kenneth Kirsten Kofi
    Konrad Lara Laszlo Laura Leila Lena Leo Leonard Liam Linda Lionel Louise Lucas Lucy Luis Lydia Magnus Malik
    Marcus Margaret Maria Marion Martha Mateo Matilda Maurice Maya Mehmet Melissa Mercy Milan Mina Miriam Mohan
    Monica Morgan Muriel Nadia Nancy Naomi Natalie Nathan Neil Nicholas Nikolai Nina Noah Nora Norman Olaf Olga
    Oliver Omar Oscar Otto Pablo Paula Pavel Pedro Penelope Petra Philip Phoebe Priya Quentin Rachel Rafael Rahul
    Ramona Raymond Rebecca Regina Renata Ricardo Rita Roland Rosa Rosalind Rupert Ruth Salma Samuel Sandra Santiago
    Sara Sergei Sheila Sidney Sigrid Silas Silvia Simon Sofia Stefan Stella Susan Svetlana Tamara Tariq Teresa
    Theodore Thomas Tobias Trevor Tristan Ulrich Ursula Valeria Vera Veronica Victor Vincent Viola Virginia Walter
    Wanda Wendell Wesley Wilfred Xavier Yasmin Yolanda Yusuf Zainab Zoe Zoltan
    """.split()  # noqa: SIM905
)
PLACES = tuple(
    """
    Aberdeen Accra Adelaide Aleppo Algiers Almaty Ankara Antwerp Arequipa Arles Asmara Athens Atlanta Auckland
    Austin Baku Baltimore Bamako Bangkok Barcelona Basel Basra Beirut Belfast Belgrade Bergen Berlin Bilbao Bogota
    Bologna Bombay Bordeaux Boston Bremen Bristol Brussels Bucharest Budapest Cairo Calgary Cali Cardiff Cartagena
    Casablanca Chennai Chicago Cologne Colombo Copenhagen Cordoba Cork Cusco Dakar Dallas Damascus Delhi Denver
    Detroit Dhaka Dresden Dublin Dundee Durban Edinburgh Essen Fargo Florence Fresno Galway Gdansk Geneva Genoa
    Ghent Glasgow Granada Graz Haifa Halifax Hamburg Hanoi Harare Havana Helsinki Hobart Houston Innsbruck Istanbul
    Izmir Jaipur Jakarta Kabul Kampala Karachi Kiel Kigali Kingston Kobe Krakow Kyoto Lagos Lahore Leeds Leipzig
    Lima Lisbon Liverpool Ljubljana London Luanda Lusaka Luxor Lyon Madrid Malaga Malmo Manila Maputo Marseille
    Medina Melbourne Memphis Miami Milan Minsk Mombasa Monterrey Montreal Moscow Mumbai Munich Muscat Nagoya Nairobi
    Nantes Naples Nashville Nice Nicosia Odessa Omaha Oran Osaka Oslo Ottawa Oxford Palermo Paris Perth Pisa
    Plymouth Porto Prague Pretoria Quebec Quito Rabat Ravenna Reims Riga Rome Rostock Rotterdam Salzburg Santiago
    Sapporo Sarajevo Seattle Seoul Seville Shanghai Sofia Split Stockholm Strasbourg Sydney Tallinn Tampa Tangier
    Tashkent Tbilisi Tehran Tirana Tokyo Toledo Toronto Toulouse Trieste Tripoli Tucson Tunis Turin Turku Utrecht
    Valencia Vancouver Venice Vienna Vilnius Warsaw Wellington Winnipeg Wuhan York Zagreb Zurich
    """.split()  # noqa: SIM905
)
VERBS = tuple(
    """
    absorb admit adopt advise allow amuse annoy appear applaud argue arrange arrive assume attack avoid bake balance
    banish begin behave believe belong blame blink boast bounce breathe bring broil build bury calculate carve cease
    chase choose chop clap climb collapse collect combine compare complain confess confuse connect consider convince
    create creep dare decay decide decorate delay deliver deny depend deserve destroy detect develop discover divide
    donate doubt drag drift drown earn embrace emerge enjoy enter erase escape examine excite expand explain explore
    fade fetch flee float follow forbid forget forgive gallop gather gaze giggle glide glow grasp greet grow hatch
    haunt hesitate hide hover hurry ignore imagine imply improve include inform inject insist inspect invent invite
    itch jog juggle knit lean learn leave linger listen lose marry melt mend mingle mumble murmur nibble nod notice
    obey object observe obtain occur offend omit operate owe perform persuade plead polish ponder pour pray predict
    prefer prepare pretend prevent produce promise protect provide pull punish pursue quarrel quit reach realize
    recite recover reduce refuse regret reject relax rely remain remind remove repair replace rescue resist retire
    return reveal ruin scold scramble scratch scribble search seem send settle shave shiver shrink shrug sigh skip
    slide slip sneeze sniff snore soak sob solve sort spell spill spoil squeeze stagger stammer stare startle steal
    stretch strive struggle stumble succeed suffer suggest supply suppose surprise survive suspect swallow swap swim
    tease tempt thank thrive tickle tolerate trace tremble trust tumble twist unite untie vanish wander warn waste
    welcome whirl whisper whistle wink wipe wish wobble wonder wrap wrestle yawn yell yield
    """.split()  # noqa: SIM905
)
_ONSETS = "b br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sm sn sp st str t th tr v w z"
_NUCLEI = "a a a e e e i i o o o u u ai ea ei ia ie io oa oo ou ue"
# Endings that no noun of the test has after two syllables.
_CODAS = "b f ft g lb ld lf lk lm ln lp lv mp nk nz pt rb rf rk rl rm rn rv rx sk sp v x z zd"


def invented(rng: random.Random) -> str:
    """A word that nobody knows, like `tolvek`; there are millions."""
    onsets, nuclei, codas = _ONSETS.split(), _NUCLEI.split(), _CODAS.split()
    word = "".join(rng.choice(onsets) + rng.choice(nuclei) for _ in range(rng.choice((2, 2, 2, 3))))
    return word + rng.choice(codas)


_PLACES_IN = (
    "near the quarry", "behind the greenhouse", "at the ferry landing", "under the viaduct", "along the towpath",
    "in the reading hall", "beside the kiln", "on the third terrace", "by the weighbridge", "inside the depot",
    "at the lower lock", "over the causeway", "below the dam", "in the archive", "around the pavilion",
    "across the moor", "at the customs shed", "in the cloakroom", "next to the bakehouse", "on the upper deck",
)  # fmt: skip
_PEOPLE = (
    "the ferryman", "two surveyors", "an apprentice", "the night porter", "a glassblower", "the bookkeeper",
    "several delegates", "the choirmaster", "a retired pilot", "the beekeeper", "three inspectors", "a locksmith",
    "the stationmaster", "a travelling salesman", "the midwife", "some volunteers", "the translator", "a cartographer",
    "the caretaker", "an auctioneer", "the lighthouse crew", "a violin maker", "the editors", "a customs officer",
)  # fmt: skip
_DEEDS = (
    "counted the remaining crates", "discussed the schedule", "varnished the railings", "waited for instructions",
    "compared several estimates", "swept the platform", "argued over the inventory", "tuned the instruments",
    "sorted the parcels", "copied the minutes", "inspected the valves", "rehearsed the speech", "folded the tarpaulins",
    "measured the humidity", "postponed the excursion", "catalogued the specimens", "polished the brass fittings",
    "reviewed the blueprints", "labelled the shelves", "unrolled a faded tapestry", "mended the nets",
    "drafted a petition", "tested the alarm", "watered the seedlings", "prepared the banquet", "closed the shutters",
)  # fmt: skip
_WHENS = (
    "shortly after noon", "despite the fog", "once the bells had stopped", "as agreed beforehand",
    "with some reluctance",
    "in complete silence", "while it hailed", "on Thursday", "under supervision", "against all advice",
    "before anyone objected", "at a leisurely pace", "for no obvious reason", "as the regulations require",
    "by candlelight", "since nobody else volunteered", "throughout the afternoon", "in spite of the noise",
)  # fmt: skip
_THINGS = (
    "the eastern corridor", "the new pumping equipment", "last year's harvest", "the committee", "the insurance policy",
    "the heating", "the library extension", "the timetable", "the exhibition", "the irrigation scheme", "the budget",
    "the telephone exchange", "the annual parade", "the old printing press", "the drainage", "the membership fee",
)  # fmt: skip
_STATES = (
    "is still under discussion", "has been a success so far", "will be dealt with next spring",
    "needs little attention",
    "was called adequate", "is expected to last", "caused a good deal of laughter", "remains a mystery",
    "has improved beyond recognition", "deserves a closer look", "was finished ahead of time",
    "pleased almost everyone",
    "turned out to be expensive", "is older than it appears", "was not mentioned at all", "depends on the weather",
)  # fmt: skip
_NOTES = (
    "So much for that.", "No further comment was made.", "Everything else went according to plan.",
    "It was, all in all, an uneventful week.", "Opinions differ on this.", "That is how matters stood.",
    "One can only guess why.", "The minutes say nothing more about it.", "This had happened before.",
    "Details can be found elsewhere.",
)  # fmt: skip
PHRASES = _PLACES_IN + _PEOPLE + _DEEDS + _WHENS + _THINGS + _STATES + _NOTES


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _deed(rng: random.Random) -> str:
    return f"{_capital(rng.choice(_PEOPLE))} {rng.choice(_DEEDS)} {rng.choice(_PLACES_IN)} {rng.choice(_WHENS)}."


def _scene(rng: random.Random) -> str:
    return f"{_capital(rng.choice(_WHENS))}, {rng.choice(_PEOPLE)} {rng.choice(_DEEDS)}."


def _matter(rng: random.Random) -> str:
    return f"{_capital(rng.choice(_THINGS))} {rng.choice(_STATES)}."


def _both(rng: random.Random) -> str:
    return f"{_capital(rng.choice(_THINGS))} {rng.choice(_STATES)}, and {rng.choice(_PEOPLE)} {rng.choice(_DEEDS)}."


def _note(rng: random.Random) -> str:
    return rng.choice(_NOTES)


_SENTENCES: tuple[Callable[[random.Random], str], ...] = (_deed, _deed, _scene, _scene, _matter, _both, _note)


def sentence(rng: random.Random) -> str:
    """One of some 200,000 filler sentences."""
    return rng.choice(_SENTENCES)(rng)
