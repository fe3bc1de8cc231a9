// Lays a built site out in Chromium, as wide as a phone and as a desk: node docs/_site/widths.cjs build/docs
// Ends with 1 where a page is wider than its window, or a table has a sliver or a row higher than a
// screen, or a table of words is wider than the page (only one of numbers may scroll), or a diff is copied with signs.
"use strict";

const { execFileSync } = require("child_process");
const fs = require("fs");
const os = require("os");
const path = require("path");

const WIDTHS = [390, 1400];
const LEAST = 40; // pixels of a cell with words
const HIGHEST = 1200; // pixels of a row
const PADDING = 4; // pixels that a table may stand out of the text, as Furo has it

// Runs in the browser, for each page in a frame.
function faults(page, frame, { LEAST, HIGHEST, PADDING }) {
  const root = frame.contentDocument.documentElement;
  const found = [];
  const width = frame.clientWidth;
  if (root.scrollWidth > width) found.push(`the page is ${root.scrollWidth} wide`);
  for (const table of frame.contentDocument.querySelectorAll(".content table:not(.genindextable)")) {
    if (table.querySelector("td.text-right")) continue;
    const { left, right } = table.getBoundingClientRect();
    const end = table.closest("article")?.getBoundingClientRect().right ?? width;
    const cut = [...table.querySelectorAll("th, td")].find((cell) => cell.scrollWidth > cell.clientWidth + 1);
    const words = (cut ?? table).innerText.trim().slice(0, 40).replace(/\s+/g, " ");
    if (right > end + PADDING || left < 0) found.push(`the table "${words}" ends at ${Math.round(right)}, not at ${Math.round(end)}`);
    else if (cut && cut.clientWidth) found.push(`words stand out of the cell "${words}"`);
  }
  for (const diff of frame.contentDocument.querySelectorAll(".highlight-diff pre")) {
    const copied = diff.cloneNode(true);
    copied.querySelectorAll(".gd, .sign").forEach((each) => each.remove()); // copybutton_exclude of conf.py
    if (/^[-+ ]\S|^ {5}\S|\n\n\n/m.test(copied.textContent)) found.push(`a diff is copied as ${copied.textContent}`);
  }
  for (const row of frame.contentDocument.querySelectorAll(".content table:not(.genindextable) tr")) {
    const words = row.innerText.trim().slice(0, 40).replace(/\s+/g, " ");
    if (row.clientHeight > HIGHEST) found.push(`the row "${words}" is ${row.clientHeight} high`);
    for (const cell of row.cells) {
      const shown = cell.getBoundingClientRect().width;
      if (shown && shown < LEAST && cell.innerText.length > 12) {
        found.push(`the cell "${cell.innerText}" is ${Math.round(shown)} wide`);
      }
    }
  }
  return found.map((fault) => `${page} at ${width} pixels: ${fault}`);
}

const site = path.resolve(process.argv[2]);
const start = path.join(site, "widths.html");
fs.rmSync(start, { force: true });
const pages = fs.readdirSync(site, { recursive: true }).filter((name) => name.endsWith(".html"));
const visit = `${faults};
  (async () => {
    const found = [];
    for (const width of ${JSON.stringify(WIDTHS)}) for (const page of ${JSON.stringify(pages)}) {
      const frame = document.createElement("iframe");
      Object.assign(frame.style, { width: width + "px", height: "900px", border: 0 });
      frame.src = page;
      document.body.append(frame);
      await new Promise((resolve) => frame.addEventListener("load", resolve));
      found.push(...faults(page, frame, ${JSON.stringify({ LEAST, HIGHEST, PADDING })}));
      frame.remove();
    }
    document.body.innerText = encodeURIComponent(JSON.stringify(found));
  })();`;
fs.writeFileSync(start, `<!doctype html><meta charset="utf-8"><body><script>${visit}</script>`);
const profile = fs.mkdtempSync(path.join(os.tmpdir(), "chromium-"));
const options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"];
options.push("--allow-file-access-from-files", `--user-data-dir=${profile}`);
options.push("--virtual-time-budget=600000", "--dump-dom", `file://${start}`);
const shown = execFileSync("chromium", options, {
  encoding: "utf8",
  stdio: ["ignore", "pipe", "ignore"],
  timeout: 300000,
});
fs.rmSync(start);
fs.rmSync(profile, { recursive: true });
const found = JSON.parse(decodeURIComponent(/<body>(.*)<\/body>/s.exec(shown)[1]));
for (const fault of found) console.error(fault);
process.exit(found.length ? 1 : 0);
