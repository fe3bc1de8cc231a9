document.addEventListener("DOMContentLoaded", () => {
  // A click on a picture opens it alone, where a phone can enlarge it.
  for (const picture of document.querySelectorAll(".content img")) {
    picture.addEventListener("click", () => window.open(picture.src, "_blank"));
  }
  // A phone shows the rows of a wide table of words as lists, with the names of the columns in
  // each. One of numbers, which are compared down a column, scrolls.
  for (const table of document.querySelectorAll(".content table")) {
    const names = [...(table.tHead?.rows[0].cells ?? [])].map((cell) => cell.innerText);
    if (names.length < 3) continue;
    table.classList.add("wide");
    if (table.querySelector("td.text-right")) continue;
    table.classList.add("lists");
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, i) => i && names[i] && (cell.dataset.column = names[i]));
    }
  }
});
