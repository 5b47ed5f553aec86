"""Templates that want too much: each is refused with a typed error, soon and in little memory, whatever it is made of."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from pathlib import Path

import pytest

from tests.models.tiny import EOS, make_stub
from tests.serving.deployment import serve_model
from trireme.errors import ModelError, RequestError
from trireme.serving.text.template_meter import TemplateSlow
from trireme.serving.text.templates import RENDER_LIMIT_S, Template

TALK = [{"role": "user", "content": "hi"}]
MUCH = 1_000_000_000
# Two lists of 2^60 numbers each, that are equal, made of 60 pieces.
HUGE = (
    "{% set ns = namespace(a=OPEN1CLOSE, b=OPEN1CLOSE) %}{% for i in range(60) %}{% set ns.a = OPENns.a, ns.aCLOSE %}"
    "{% set ns.b = OPENns.b, ns.bCLOSE %}{% endfor %}"
)
LISTS = HUGE.replace("OPEN1CLOSE", "[1]").replace("OPEN", "[").replace("CLOSE", "]")
TUPLES = HUGE.replace("OPEN1CLOSE", "(1,)").replace("OPEN", "(").replace("CLOSE", ")")
LOOP = "{% for i in range(99999) %}"
BIG = "{% set a = 'x' * 2000000 %}"

TOO_SLOW = {
    "loops": "{% set x = range(99999) | list %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
    "filtered loops": "{% set x = range(99999) %}{% for a in x %}{% for b in x if false %}{% endfor %}{% endfor %}",
    "conditions": LOOP + LOOP + "{% if i == messages %}{% endif %}{% endfor %}{% endfor %}",
    "tests": "{% set x = range(99999) | list %}{% for i in x %}{% set q = i in x %}{% endfor %}",
    "filters": "{% set x = range(99999) | list %}{% for i in x %}{% set q = (x | sort)[0] %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "one hash": "{{ range(0, 99999 * 2305843009213693951, 2305843009213693951) | unique | list | length }}",
    **{
        f"huge lists {i}": LISTS + use for i, use in enumerate(["{{ ns.a }}", "{{ ns.a | tojson }}", "{{ ns.a ~ '' }}"])
    },
    **{f"huge lists = {i}": LISTS + use for i, use in enumerate(["{{ ns.a == ns.b }}", "{{ ns.a in [ns.b] }}"])},
    **{
        f"huge lists < {i}": LISTS + use
        for i, use in enumerate(["{{ [ns.a, ns.b] | sort }}", "{{ [ns.a].index(ns.b) }}"])
    },
    "huge lists changed": LISTS + "{% for i in [ns.a, ns.b] %}{{ loop.changed(i) }}{% endfor %}",
    "huge tuples": TUPLES + "{{ {ns.a: 1} }}",
    "huge tuples as keys": TUPLES + "{{ {}.get(ns.a) }}",
    "huge tuples as items": TUPLES + "{{ {}[ns.a] }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
}
TOO_LARGE = {
    "text * n": f"{{{{ 'x' * {MUCH} }}}}",
    "n * text": f"{{{{ {MUCH} * 'x' }}}}",
    "list * n": "{% set x = [1] * 200000000 %}",
    "power": "{% set x = 9 ** (9 ** 7) %}",
    "power of a variable": "{% set a = 9 %}{{ a ** (a ** 7) }}",
    "squares": "{% set ns = namespace(a=9) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    **{name: f"{{{{ 'x'.{name}({MUCH}) }}}}" for name in ("center", "ljust", "rjust", "zfill")},
    "expandtabs": f"{{{{ '\\t'.expandtabs({MUCH}) }}}}",
    "center filter": f"{{% if ('x' | center({MUCH})) | length %}}{{% endif %}}",
    "indent": f"{{{{ 'a\\nb' | indent({MUCH}) }}}}",
    "slice": f"{{{{ 'abc' | slice({MUCH}) | list }}}}",
    "batch": f"{{{{ 'abc' | batch({MUCH}, 'x') | list }}}}",
    "round": f"{{{{ 5 | round({MUCH}, 'floor') }}}}",
    "round before the point": f"{{{{ 5 | round(-{MUCH}) }}}}",
    "printf": f"{{{{ '%{MUCH}d' % 1 }}}}",
    "printf by a value": f"{{{{ '%*d' % ({MUCH}, 1) }}}}",
    "printf places": f"{{{{ '%.{MUCH}f' % 1.0 }}}}",
    "printf repeated": "{{ ('%(a)s' * 1000) % {'a': 'x' * 100000} }}",
    "format filter": f"{{{{ '%{MUCH}d' | format(1) }}}}",
    "str.format": f"{{{{ '{{:{MUCH}}}'.format(1) }}}}",
    "str.format by a value": f"{{{{ '{{:{{}}}}'.format(1, {MUCH}) }}}}",
    "str.format by attr": f"{{{{ ('{{:{MUCH}}}' | attr('format'))(1) }}}}",
    "format_map": f"{{{{ '{{a:{MUCH}}}'.format_map({{'a': 1}}) }}}}",
    "tojson indent": f"{{{{ {{'a': 1}} | tojson(indent={MUCH}) }}}}",
    "tojson separators": "{{ ([1] * 1000) | tojson(separators=('x' * 1000000, ':')) }}",
    "deep json": "{% set ns = namespace(a=range(9999) | list) %}{% for i in range(400) %}{% set ns.a = [ns.a] %}{% endfor %}"
    "{{ ns.a | tojson(indent=64) }}",
    "replace": BIG + "{{ a.replace('x', a) }}",
    "replace nothing": BIG + "{{ a.replace('', a) }}",
    "replace filter": BIG + "{{ a | replace('x', a) }}",
    "join": BIG + "{{ a.join(range(9999) | map('string')) }}",
    "join filter": BIG + "{{ range(9999) | join(a) }}",
    "join of a generator": BIG + "{{ range(99999) | map('replace', '1', a) | join }}",
    "join of attributes": BIG + "{{ ([{'b': a}] * 1000) | join('', attribute='b') }}",
    "sum of lists": "{{ ([[1]] * 100000) | sum(start=[]) | length }}",
    "doubled": "{% set ns = namespace(a='x') %}" + LOOP + "{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "doubled by ~": "{% set ns = namespace(a='x') %}" + LOOP + "{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "doubled list": "{% set ns = namespace(a=[1]) %}" + LOOP + "{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "doubled block": "{% set ns = namespace(a='x') %}" + LOOP + "{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}"
    "{% set ns.a = b %}{% endfor %}",
    "captured data": "{% set b %}" + LOOP + LOOP + "y" * 10000 + "{% endfor %}{% endfor %}{% endset %}",
    "filtered data": "{% filter upper %}" + LOOP + "y" * 10000 + "{% endfor %}{% endfilter %}",
    "a macro's data": "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}"
    + LOOP
    + "y" * 10000
    + "{% endfor %}{% endcall %}",
    "texts in a list": "{% set ns = namespace(a=[]) %}" + BIG + LOOP + "{% set ns.a = ns.a + [a ~ i] %}{% endfor %}",
    "copies of a list": "{% set ns = namespace(a=[], b=range(99999) | list) %}"
    + LOOP
    + "{% set ns.a = ns.a + [ns.b[:]] %}{% endfor %}",
    "split": "{{ ('ab' * 2000000).split('a') }}",
    "split lines": "{{ ('a\\n' * 2000000).splitlines() }}",
    "letters": "{{ ('ab' * 2000000) | list }}",
    "arguments": "{{ dict(*('x' * 4000000)) }}",
    "strip": BIG + "{{ a.strip('b' * 2000000 ~ 'x') }}",
    "batch by name": f"{{{{ 'abc' | batch(linecount={MUCH}, fill_with='x') | list }}}}",
    "slice by name": f"{{{{ 'abc' | slice(slices={MUCH}) | list }}}}",
    "round by name": f"{{{{ 5 | round(precision={MUCH}, method='floor') }}}}",
    "center by name": f"{{{{ 'x' | center(width={MUCH}) }}}}",
    "indent by name": f"{{{{ 'a\\nb' | indent(width={MUCH}) }}}}",
    "trim by name": BIG + "{{ a | trim(chars='b' * 2000000 ~ 'x') }}",
    "trim": BIG + "{{ a | trim('b' * 2000000 ~ 'x') }}",
    "rfind": BIG + "{{ a.rfind('b' ~ 'x' * 1000000) }}",
    "rsplit": BIG + "{{ a.rsplit('b' ~ 'x' * 1000000) }}",
    "tags": "{{ ('<!---->' * 500000) | striptags }}",
    "a date": "{{ strftime_now('%Y' * 1000000) }}",
    "digits": "{{ ('f' * 4000000) | int(0, 16) }}",
}
REFUSED = {
    "lipsum": "{{ lipsum(1000000) }}",
    "translate": "{{ 'a'.translate({97: 'b'}) }}",
    "to_bytes": f"{{{{ (1).to_bytes({MUCH}, 'big') }}}}",
    "fromkeys": "{{ {}.fromkeys(range(99999)) }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
    "functions of functions": "{{ dict.func }}{{ dict.args[0].start(9) }}",
    "sets": "{{ {}.keys() - {}.keys() }}",
    "no function": "{{ none() }}",
}
NO_TEMPLATE = {
    "long": "x" * (1 << 18),
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "sum": "{{ " + "1+" * 5000 + "1 }}",
    "conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "loops": "{% for a in b %}" * 25 + "{% endfor %}" * 25,
    "macros": "{% macro a() %}" * 140 + "{% endmacro %}" * 140,
    "else": "{% if 1 %}" + "{% elif a %}" * 8000 + "{% endif %}",
    "digits": "{{ " + "9" * 5000 + " }}",
    "break": "{% break %}",
    "arguments": "{% macro f(a, a) %}{% endmacro %}",
    "autoescape": "{% autoescape true %}{% endautoescape %}",
    "filter": "{{ 1 | pprint }}",
}


def refusal_of(source: str, limit_s: float = RENDER_LIMIT_S) -> tuple[str, float]:
    """Why it is refused, and the processor time that took. The process may grow by 512 MiB at most."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template, start = Template(source, name="t"), time.thread_time()
    with pytest.raises(RequestError) as refused:
        template.render(TALK, limit_s=limit_s)
    took_s = time.thread_time() - start
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 512 << 10
    return refused.value.message, took_s


@pytest.mark.parametrize("name", TOO_SLOW)
def test_time_is_looked_at_everywhere(name: str) -> None:
    message, took_s = refusal_of(TOO_SLOW[name])
    assert "ran longer than 250 ms" in message or "characters" in message
    assert took_s < 1


@pytest.mark.parametrize("name", TOO_LARGE)
def test_nothing_large_is_made(name: str) -> None:
    message, took_s = refusal_of(TOO_LARGE[name], limit_s=10)
    assert "more than" in message or "excessive" in message or "long text" in message, message
    assert took_s < 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_listed_is_not_there(name: str) -> None:
    assert refusal_of(REFUSED[name])[1] < 1


@pytest.mark.parametrize("name", NO_TEMPLATE)
def test_what_does_not_compile_is_a_model_error(name: str) -> None:
    start = time.thread_time()
    with pytest.raises(ModelError, match="the chat template t "):
        Template(NO_TEMPLATE[name], name="t")
    assert time.thread_time() - start < 6


@pytest.mark.parametrize(
    "source", ["{% if false %}{{ [1] * 200000000 }}{% endif %}", "{% if false %}{{ 9 ** 9 ** 9 }}{% endif %}"]
)
def test_compiling_computes_nothing(source: str) -> None:
    assert Template(source, name="t").render(TALK) == ""


def test_long_conversations_are_within_the_limits() -> None:
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text + m.role %}"
        "{{ '<|im_start|>' + m.role + '\n' + (m.content.split('</think>')[-1] | trim) + '<|im_end|>\n' }}{% endfor %}"
    )
    talk = [{"role": "user", "content": "word " * 180}] * 4096
    assert len(Template(source, name="t").render(talk)) == 4096 * (12 + 4 + 1 + 899 + 10 + 1)


def test_each_thread_has_its_own_limits() -> None:
    template = Template("{% for m in messages %}{{ m.content }}{% endfor %}" + TOO_SLOW["loops"], name="t")
    quick = Template("{{ messages[0].content }}", name="t")
    seen: list[str] = []

    def slow() -> None:
        with pytest.raises(TemplateSlow):
            template.render(TALK, limit_s=0.1)
        seen.append("slow")

    threads = [threading.Thread(target=slow) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert quick.render(TALK) == "hi"
    assert seen == ["slow"] * 3


class LoopWatch:
    """The longest that this thread's loop has computed without a pause, in seconds of its processor time."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while True:
            start = time.thread_time()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.thread_time() - start)

    def stop(self) -> float:
        self._watching.cancel()
        return self.longest_s


async def test_a_slow_template_keeps_nobody_waiting(tmp_path: Path) -> None:
    """It is refused by name, and meanwhile the loop answers others: no wait is as long as the template's time."""
    model = make_stub(tmp_path / "model", scripts=[["x", EOS]], chat_template=TOO_SLOW["loops"])
    async with serve_model(model) as served:
        watch = LoopWatch()
        for path in ("/v1/chat/completions", "/tokenize", "/v1/chat/completions"):
            status, answer = await served.post(path, {"model": "stub", "messages": TALK})
            assert (status, answer["error"]["param"]) == (400, "messages")
            assert "ran longer than 250 ms" in answer["error"]["message"]
        assert watch.stop() < 0.1
        assert (await served.post("/v1/completions", {"model": "stub", "prompt": "a"}))[0] == 200


async def test_a_template_that_writes_much_keeps_nobody_waiting(tmp_path: Path) -> None:
    model = make_stub(tmp_path / "model", scripts=[["x", EOS]], chat_template="{{ 'ab ' * 300000 }}")
    async with serve_model(model) as served:
        watch = LoopWatch()
        status, answer = await served.post("/v1/chat/completions", {"model": "stub", "messages": TALK})
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "messages has 900000 characters" in answer["error"]["message"]
        assert watch.stop() < 0.1
