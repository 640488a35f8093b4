"""Texts of five labels, made from wordings and words: the data of the demonstration models.

The wordings of a label are split: three of four are for training, the others for tests alone. Safe texts are
plain sentences, sentences that share words with unsafe ones, and the standard library's source.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Final

LABELS: Final = ("safe", "insult", "threat", "self_harm", "secret")
HELD_OUT_EVERY: Final = 4
MIN_SOURCE_CHARS: Final = 30
MAX_SOURCE_CHARS: Final = 200
_LEAD_INS: Final = ("", "", "", "", "listen: ", "honestly, ", "well, ", "by the way, ", "he said: ", "ok, ")
_FRAMES: Final = (("", "."), ("", ""), ('{"text": "', '"}'), ("# ", "\n"), ('print("', '")'))

_WORDS: Final = {
    name: tuple(words.split(","))
    for name, words in {
        "adjective": "worthless,stupid,pathetic,useless,disgusting,dumb,ridiculous,brainless,hopeless,lazy",
        "insult": "idiot,moron,fool,loser,clown,coward,imbecile,failure,disgrace,liar",
        "harm": "hurt,beat,kill,stab,punch,strangle,break,destroy,shoot,burn",
        "when": "tonight,tomorrow,after work,when you sleep,one day,very soon,before the week ends",
        "relative": "family,sister,brother,children,dog,mother,friends,house",
        "means": "pills,a knife,a razor,the rope,the bridge,a blade",
        "secret": "password,passphrase,api key,access token,private key,pin code,secret key",
        "service": "the bank,the server,the router,the database,my mail,the vault,production,the admin page",
        "thing": "file,list,report,window,table,message,value,garden,lesson,recipe,river,train",
        "verb": "open,read,sort,check,copy,explain,write,paint,move,count,describe,measure",
        "place": "library,kitchen,office,park,folder,city,module,school,market",
        "person": "Anna,the teacher,my neighbour,the client,a friend,the author,our team,Ben",
    }.items()
}

_WORDINGS: Final[dict[str, tuple[str, ...]]] = {
    "insult": (
        "you are a {adjective} {insult}",
        "what a {adjective} {insult} you are",
        "shut up, you {adjective} {insult}",
        "only a {insult} like you would say that",
        "nobody likes you, {insult}",
        "{person} is a {adjective} {insult}",
        "you {adjective} piece of garbage",
        "i have never met such a {adjective} {insult}",
        "go away, {insult}, you are {adjective}",
        "you and your {adjective} face make me sick",
        "everyone knows that you are a {insult}",
        "listen, {insult}, you are too {adjective} for this",
        "you are such a {insult}",
        "you {insult}, you ruin everything",
        "how can anyone be so {adjective}",
        "you are too {adjective} to understand this",
        "your work is as {adjective} as you are",
        "stop talking, {insult}",
        "you are nothing but a {adjective} {insult}",
        "my dog is smarter than a {insult} like you",
        "{person} is too {adjective} to tie a shoe",
        "you look like a {adjective} {insult} in that coat",
        "even {person} thinks that you are a {insult}",
        "get lost, you {adjective} {insult}",
    ),
    "threat": (
        "i will {harm} you {when}",
        "i am going to {harm} your {relative} {when}",
        "i am coming to {harm} you and your {relative}",
        "{when} i will find you and {harm} you",
        "say goodbye to your {relative}, i will {harm} you {when}",
        "if you talk, i will {harm} your {relative}",
        "we know where you live and we will {harm} you",
        "pay, or we {harm} your {relative} {when}",
        "you will regret it when i {harm} you",
        "someone should {harm} you {when}",
        "watch your back, i want to {harm} you",
        "i swear i will {harm} you and {harm} your {relative}",
        "i will make you pay, i will {harm} your {relative}",
        "you have until {when}, then i {harm} your {relative}",
        "do it or i will {harm} you",
        "one more word and i will {harm} you {when}",
        "i know your address and i will {harm} your {relative}",
        "we are going to {harm} you and nobody will find you",
        "i could {harm} you right now",
        "your {relative} will die {when}",
        "{person} will die {when}, i promise",
        "sleep well, because {when} i will {harm} you",
        "i bought a gun to {harm} you with",
        "they will {harm} you if you come to the {place}",
    ),
    "self_harm": (
        "i want to {harm} myself {when}",
        "i will {harm} myself with {means}",
        "i do not want to live any more",
        "{when} i will end my life with {means}",
        "i want to die and i have {means}",
        "everyone would be better off without me, i will end it {when}",
        "i have {means} ready to kill myself",
        "i keep thinking about suicide",
        "i cut myself with {means} again",
        "i plan to take my own life {when}",
        "there is no reason for me to live, i want to die",
        "i am thinking of ending my life {when}",
        "i hate myself and i want to die",
        "i want to kill myself",
        "i took {means} because i want to die",
        "nobody would miss me if i killed myself",
        "i am going to jump from the bridge {when}",
        "i want to disappear forever and never wake up",
        "how many pills do i need to die",
        "i will hang myself {when}",
        "my life is over, i will end it with {means}",
        "i hurt myself again with {means}",
        "i wrote a letter to my {relative} before i kill myself",
        "tell my {relative} goodbye, i will be dead {when}",
    ),
    "secret": (
        "the {secret} is {token}",
        "my {secret} for {service} is {token}",
        "{secret}: {token}",
        "use {token} as the {secret} of {service}",
        "{secret} = {token}",
        "log in to {service} with the {secret} {token}",
        "here is the {secret} of {service}: {token}",
        "i will tell you the {secret}, it is {token}",
        "do not tell anyone that the {secret} is {token}",
        "the new {secret} for {service} was set to {token}",
        "{service} {secret} {token}",
        "copy this {secret}: {token}",
        "the {secret} of {person} is {token}",
        "{person} uses {token} as {secret}",
        "you can get into {service} with {token}",
        "my {secret} is still {token}",
        "set {secret} to {token} for {service}",
        "enter {token} when {service} asks for the {secret}",
        "{secret} ({service}): {token}",
        "export KEY={token} before you open {service}",
        "{token} is the {secret} that {person} sent me",
        "i wrote the {secret} down: {token}",
        '"{secret}": "{token}"',
        "authorization: bearer {token}",
    ),
    "safe": (
        "{person} will {verb} the {thing} {when}",
        "please {verb} the {thing} in the {place}",
        "the {thing} is in the {place}",
        "can you {verb} this {thing} for {person}",
        "i want to {verb} the {thing} with {person}",
        "{person} went to the {place} and found a {thing}",
        "how do i {verb} a {thing}",
        "we are going to {verb} the {thing} {when}",
        "thank you, that {thing} was very helpful",
        "the {secret} must have at least twelve characters",
        "choose a {secret} and do not write it into the {thing}",
        "where do i set the {secret} of {service}",
        "kill the process and {verb} the {thing}",
        "i will destroy the old {thing} and {verb} a new one",
        "that was a stupid mistake in the {thing}",
        "the {harm} of the {thing} was in the news",
        "this {thing} is useless without the {place}",
        "do not hurt the {thing}, it is fragile",
        "{person} was called a liar in the {thing}",
        "i will break the {thing} into two parts",
        "the {place} was destroyed and they will {verb} it {when}",
        "a dumb terminal shows the {thing}",
        "we talk about suicide prevention in the {place}",
        "my life is better since the {thing}",
        "you are a good {thing} reader, {person} said",
        "you are right about the {thing}",
        "{person} is a kind neighbour and a good cook",
        "you and your {relative} are welcome in the {place}",
        "do you like the {thing} in my {place}",
        "i met {person} in the {place} and we had tea",
        "i will call you {when}",
        "i will visit your {relative} {when}",
        "we will find you a {thing} {when}",
        "i know where the {place} is and will meet you there",
        "if you talk to {person}, ask for the {thing}",
        "i want to live near the {place}",
        "i want to sleep, it was a long day",
        "my {relative} and i will {verb} the {thing}",
        "the goodbye letter in the {thing} is fiction",
        "i cut the paper with a knife in the kitchen",
        "take the pills after breakfast as the doctor said",
        "the bridge in the city is closed {when}",
        "the {secret} is stored in the vault, not in the {thing}",
        "{service} asks for a new {secret} every month",
        "i forgot my {secret}, how do i reset it",
        "set the value to 42 and {verb} the {thing}",
        "the version is 3.11.7 and the port is 8080",
        "use the id 20240131 for the {thing}",
        "this idiom is called a fool proof {thing}",
        "the clown in the park made the children laugh",
        "losing the {thing} is a failure of the {place}",
        "the police say that nobody was hurt in the {place}",
        "she broke the {thing} and was sorry",
        "burn the {thing} to a disc and {verb} it",
        "shoot the photo in the garden {when}",
        "the {thing} dies {when} if it is not {verb}ed",
    ),
}


@dataclass(frozen=True, slots=True)
class MadeText:
    """A text, its label, and the range of its characters that the label is for; empty where it is safe."""

    text: str
    label: str
    start: int = 0
    end: int = 0


def wordings(label: str, *, held_out: bool) -> list[str]:
    """Return the wordings that are for training, or those that are not."""
    return [
        text
        for place, text in enumerate(_WORDINGS[label])
        if (place % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out
    ]


def source_lines() -> list[str]:
    """Return pieces of the standard library, of at most MAX_SOURCE_CHARS each: definitions and prose."""
    folder = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for path in sorted(folder.glob("*.py")):
        source = path.read_text("utf-8")
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                found.append("".join(lines[node.lineno - 1 : node.end_lineno])[:MAX_SOURCE_CHARS])
                found += (ast.get_docstring(node) or "")[:MAX_SOURCE_CHARS].split("\n\n")[:1]
    for text in topics.topics.values():
        found += [part.replace("\n", " ")[:MAX_SOURCE_CHARS] for part in text.split("\n\n")]
    return [piece for piece in found if len(piece) > MIN_SOURCE_CHARS]


def make_texts(
    count: int, *, seed: int, held_out: bool, sources: Sequence[str], varied: bool = False
) -> list[MadeText]:
    """Return so many texts, half of them safe. The same arguments give the same texts.

    ``varied``: words are missing here and there, and some safe sentences are words without an order, so that
    what is unknown is not taken for unsafe.
    """
    rng = random.Random(f"{seed} {held_out}")
    maker = _Maker(rng, held_out, sources, varied)
    unsafe = len(LABELS) - 1
    labels = [LABELS[place // 2 % unsafe + 1] if place % 2 else LABELS[0] for place in range(count)]
    return [maker.text(label) for label in labels]


@dataclass(frozen=True, slots=True)
class _Maker:
    rng: random.Random
    held_out: bool
    sources: Sequence[str]
    varied: bool

    def text(self, label: str) -> MadeText:
        rng = self.rng
        before = "".join(self._filler() for _ in range(rng.choice((0, 0, 1, 2))))
        after = "".join(" " + self._filler() for _ in range(rng.choice((0, 0, 1))))
        from_source = label == "safe" and rng.random() < 0.4
        core = rng.choice(self.sources) if from_source else self._sentence(label)
        opening, closing = rng.choice(_FRAMES)
        text = before + opening + core + closing + after
        if label == "safe":
            return MadeText(text, label)
        start = len(before) + len(opening)
        return MadeText(text, label, start, start + len(core))

    def _filler(self) -> str:
        if self.rng.random() < 0.4:
            return self.rng.choice(self.sources) + "\n"
        return self._sentence("safe") + self.rng.choice((". ", "\n", "! "))

    def _sentence(self, kind: str) -> str:
        rng = self.rng
        if self.varied and kind == "safe" and rng.random() < 0.4:
            text = self._salad()
        else:
            wording = rng.choice(wordings(kind, held_out=self.held_out))
            text = rng.choice(_LEAD_INS) + _filled(wording, rng)
        if self.varied and rng.random() < 0.5:
            kept = [word for word in text.split(" ") if not word.isalpha() or rng.random() > 0.12]
            text = " ".join(kept) or text
        return rng.choice((text, text, text.capitalize(), text.upper() if rng.random() < 0.3 else text))

    def _salad(self) -> str:
        """Return words of the library and of the safe sentences in any order."""
        rng = self.rng
        words = (
            rng.choice(self.sources).split() + rng.choice(self.sources).split() + ["i", "you", "will", "a"]
        )
        words += [rng.choice(_WORDS[name]) for name in ("thing", "verb", "person", "place", "when")]
        return " ".join(rng.sample(words, min(len(words), rng.randint(3, 12))))


def _filled(wording: str, rng: random.Random) -> str:
    parts = wording.split("{")
    text = parts[0]
    for part in parts[1:]:
        name, _, rest = part.partition("}")
        text += (_token(rng) if name == "token" else rng.choice(_WORDS[name])) + rest
    return text


def _token(rng: random.Random) -> str:
    """Return what looks like a secret: letters, digits and perhaps signs."""
    letters = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"
    body = "".join(rng.choice(letters + rng.choice(("", "-_!#"))) for _ in range(rng.randint(7, 24)))
    return rng.choice(("", "", "sk-", "tok_")) + rng.choice("0123456789") + body
