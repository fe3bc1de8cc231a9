// Lays a built site out in Chromium, as wide as a phone and as a desk: node docs/_site/widths.cjs build/docs
// Ends with 1 where a page is wider than its window, or a table has a sliver or a row higher than a screen.
"use strict";

const { execFileSync } = require("child_process");
const fs = require("fs");
const os = require("os");
const path = require("path");

const WIDTHS = [390, 1400];
const LEAST = 40; // pixels of a cell with words
const HIGHEST = 1200; // pixels of a row

// Runs in the browser, for each page in a frame.
function faults(page, frame, { LEAST, HIGHEST }) {
  const root = frame.contentDocument.documentElement;
  const found = [];
  const width = frame.clientWidth;
  if (root.scrollWidth > width) found.push(`the page is ${root.scrollWidth} wide`);
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
      found.push(...faults(page, frame, ${JSON.stringify({ LEAST, HIGHEST })}));
      frame.remove();
    }
    document.body.innerText = encodeURIComponent(JSON.stringify(found));
  })();`;
const start = path.join(site, "widths.html");
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
