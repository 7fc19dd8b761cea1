"""Tables as text and HTML."""

from distrib.render import MOST_ROWS, Table, as_html, as_text

TABLE = Table("reads", ("variable", "bytes"), (("w <1>", 401408), ("b", 7)))


def test_text():
    assert as_text("step", [TABLE, Table("writes nothing", ("variable",), ())]).splitlines() == [
        "step",
        "",
        "reads",
        "  variable    bytes",
        "  w <1>     401,408",
        "  b               7",
        "",
        "writes nothing",
    ]


def test_html():
    assert as_html("a & b", [TABLE, Table("nothing", ("x",), ())]) == (
        "<div><p><b>a &amp; b</b></p><p>reads</p><table><thead><tr>"
        '<th style="text-align: left">variable</th><th style="text-align: right">bytes</th>'
        "</tr></thead><tbody><tr>"
        '<td style="text-align: left">w &lt;1&gt;</td><td style="text-align: right">401,408</td>'
        '</tr><tr><td style="text-align: left">b</td><td style="text-align: right">7</td></tr>'
        "</tbody></table><p>nothing</p></div>"
    )


def test_long_tables_are_cut():
    table = Table("many", ("n",), tuple((i,) for i in range(MOST_ROWS + 2)))
    assert as_text("", [table]).splitlines()[-1] == "  and 2 more"
    assert as_html("", [table]).endswith("</table><p>and 2 more</p></div>")
