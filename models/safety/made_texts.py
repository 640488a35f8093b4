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
from typing import Final

LABELS: Final = ("safe", "insult", "threat", "self_harm", "secret")
HELD_OUT_EVERY: Final = 4
MAX_SOURCE_CHARS: Final = 200
_SOURCES: Final = ("argparse", "ast", "csv", "dataclasses", "difflib", "functools", "heapq", "inspect")

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
    """Return definitions of the standard library, of at most MAX_SOURCE_CHARS each."""
    folder, found = Path(sysconfig.get_path("stdlib")), []
    for name in _SOURCES:
        source = (folder / f"{name}.py").read_text("utf-8")
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                found.append("".join(lines[node.lineno - 1 : node.end_lineno])[:MAX_SOURCE_CHARS])
    return found


def make_texts(count: int, *, seed: int, held_out: bool, sources: Sequence[str]) -> list[MadeText]:
    """Return so many texts, half of them safe. The same arguments give the same texts."""
    rng = random.Random(f"{seed} {held_out}")
    unsafe = len(LABELS) - 1
    labels = [LABELS[place // 2 % unsafe + 1] if place % 2 else LABELS[0] for place in range(count)]
    return [_made(label, rng, held_out, sources) for label in labels]


def _made(label: str, rng: random.Random, held_out: bool, sources: Sequence[str]) -> MadeText:
    def sentence(kind: str) -> str:
        text = _filled(rng.choice(wordings(kind, held_out=held_out)), rng)
        return rng.choice((text, text, text.capitalize(), text.upper() if rng.random() < 0.3 else text))

    def filler() -> str:
        if rng.random() < 0.3:
            return rng.choice(sources) + "\n"
        return sentence("safe") + rng.choice((". ", "\n", "! "))

    before = "".join(filler() for _ in range(rng.choice((0, 0, 1, 2))))
    after = "".join(" " + filler() for _ in range(rng.choice((0, 0, 1))))
    core = sentence(label) if label != "safe" or rng.random() < 0.7 else rng.choice(sources)
    frames = (("", "."), ("", ""), ('{"text": "', '"}'), ("# ", "\n"), ('print("', '")'))
    opening, closing = rng.choice(frames)
    text = before + opening + core + closing + after
    if label == "safe":
        return MadeText(text, label)
    start = len(before) + len(opening)
    return MadeText(text, label, start, start + len(core))


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
