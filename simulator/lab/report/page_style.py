"""How the page looks: one column that is readable on a phone, two plots side by side where there is room."""

from __future__ import annotations

from typing import Final

# Okabe and Ito's palette first: readers who do not see red or green can distinguish it.
_LIGHT: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#b8860b",
    "#56b4e9",
    "#6f4fa3",
    "#7a7a7a",
    "#a6402d",
    "#3b6e22",
)
_DARK: Final = (
    "#5aaee6",
    "#f28e4b",
    "#3fc79f",
    "#e3a0c6",
    "#e0b84c",
    "#8fd0f5",
    "#ad92dc",
    "#b0b0b0",
    "#e08a78",
    "#8fc46f",
)


def _palette(colours: tuple[str, ...]) -> str:
    return "".join(f"--s{index}:{colour};" for index, colour in enumerate(colours))


STYLE: Final = (
    f":root{{color-scheme:light dark;--page:#fff;--ink:#1c2733;--soft:#5b6875;--grid:#e3e8ed;--box:#f6f8fa;"
    f"--span:#f5c97a55;{_palette(_LIGHT)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{--page:#12171d;--ink:#e4eaf0;--soft:#98a5b3;--grid:#2a333d;"
    f"--box:#1a2129;--span:#8a6a2a55;{_palette(_DARK)}}}}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:14px/1.45 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:20px}
h1{font-size:24px;margin:0}
h2{font-size:16px;margin:24px 0 8px}
p{margin:4px 0}
.facts{color:var(--soft)}
.bad{border-left:4px solid #c0392b;padding:2px 14px;margin:12px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin:16px 0}
.tiles div{background:var(--box);border-radius:6px;padding:10px 12px}
.tiles dt{color:var(--soft);font-size:12px}
.tiles dd{margin:0;font-size:12px;color:var(--soft)}
.tiles dt+dd{font-size:20px;color:var(--ink);font-variant-numeric:tabular-nums}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:14px}
figure{margin:0;background:var(--box);border-radius:6px;padding:10px 12px}
figcaption{font-weight:600;margin-bottom:4px}
figure ul{list-style:none;margin:2px 0 0;padding:0;display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12px}
figure li{color:var(--soft)}
figure li::before{content:"";display:inline-block;width:14px;height:3px;margin-right:5px;
vertical-align:middle;background:var(--c)}
svg{display:block;width:100%;height:auto}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
.grid{stroke:var(--grid);stroke-width:1;fill:none}
.axis{stroke:var(--soft);stroke-width:1;fill:none}
.line{fill:none;stroke:var(--c);stroke-width:1.6;stroke-linejoin:round}
.dashed,.mark{stroke-dasharray:5 3}
.mark{stroke:var(--soft);stroke-width:1.2;fill:none}
.area{fill:var(--c);stroke:none;opacity:.8}
.bar{fill:var(--s0)}
.span{fill:var(--span)}
.side{display:grid;grid-template-columns:repeat(auto-fit,minmax(280px,1fr));gap:0 24px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:3px 6px;border-bottom:1px solid var(--grid);white-space:nowrap}
th{color:var(--soft);font-weight:500;font-size:12px}
.name{text-align:left}
"""
    + "".join(f".c{index}{{--c:var(--s{index})}}" for index in range(10))
)
