// The texts of a page whose contrast with what is behind them is below level AA of WCAG 2.2, as "text: ratio".
() => {
  const channels = (text) => { const found = text.match(/[\d.]+/g).map(Number); return { rgb: found.slice(0, 3), alpha: found[3] ?? 1 }; };
  const over = (top, under) => top.rgb.map((each, index) => each * top.alpha + under[index] * (1 - top.alpha));
  const light = (rgb) => rgb.map((each) => each / 255).map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const colour = channels(getComputedStyle(each).backgroundColor);
      layers.push(colour);
      if (colour.alpha === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || element.closest("svg, script, noscript, option, .skip, :disabled")) continue;
    const style = getComputedStyle(element), back = behind(element), front = over(channels(style.color), back);
    const [most, least] = [light(front), light(back)].sort((a, b) => b - a);
    const ratio = (most + 0.05) / (least + 0.05);
    const isLarge = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) found.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return found;
}
