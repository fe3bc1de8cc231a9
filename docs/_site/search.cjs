// Asks the search of a built site what users ask: node docs/_site/search.cjs build/docs
// Ends with 1 unless each answer has the right page among its first three.
"use strict";

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const PAGES = {
  "nan loss": "troubleshooting",
  Trainer: "trainers",
  resume: "checkpoints",
  "loss scale": "troubleshooting",
  "No module named apex": "old_scripts",
  clip_grad_norm: "troubleshooting",
  bf16: "bf16",
  "undefined symbol": "troubleshooting",
  uninstall: "install",
  wandb: "monitor",
  GradScaler: "fp16_today",
  overflow: "troubleshooting",
  OOM: "memory",
  "8bit": "memory",
  speedup: "speed",
  muon: "memory",
  adafactor: "memory",
  QLoRA: "trainers",
  ROCm: "install",
  "mat1 and mat2 must have the same dtype": "troubleshooting",
};

const site = process.argv[2];
const page = {
  document: { getElementById: () => ({}) },
  SPHINX_HIGHLIGHT_ENABLED: false,
  _: (text) => text,
  _ready() {},
};
page.window = page;
vm.createContext(page);
const load = (...name) => vm.runInContext(fs.readFileSync(path.join(site, ...name), "utf8"), page);
load("_static", "language_data.js");
load("_static", "searchtools.js");
vm.runInContext("Search.query = () => {}", page);
load("searchindex.js");

let missed = 0;
for (const [query, expected] of Object.entries(PAGES)) {
  page.query = query;
  const found = vm.runInContext("Search._performSearch(...Search._parseQuery(query))", page);
  const first = found.slice(-3).reverse().map((result) => result[0] + result[2]);
  if (!first.some((each) => each.split("#")[0] === expected)) {
    console.error(`The search for ${query} finds ${first.join(", ")}; it should find ${expected}`);
    missed += 1;
  }
}
process.exit(missed ? 1 : 0);
