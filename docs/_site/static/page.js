document.addEventListener("DOMContentLoaded", () => {
  // A click on a picture opens it alone, where a phone can enlarge it.
  for (const picture of document.querySelectorAll(".content img")) {
    picture.addEventListener("click", () => window.open(picture.src, "_blank"));
  }
  // A diff is copied without the lines that it removes, and without the signs of the others.
  for (const line of document.querySelectorAll(".highlight-diff :is(.gd, .gi, .w)")) {
    const end = line.nextSibling;
    if (line.matches(".w")) line.classList.add("sign");
    else if (line.matches(".gi")) line.innerHTML = `<span class="sign">+</span>${line.innerHTML.slice(1)}`;
    else if (end?.data?.startsWith("\n")) line.append(end.splitText(1).previousSibling);
  }
  // A phone shows the rows of a wide table of words as lists, with the names of the columns in
  // each. One of numbers, which are compared down a column, scrolls.
  for (const table of document.querySelectorAll(".content table")) {
    const names = [...(table.tHead?.rows[0].cells ?? [])].map((cell) => cell.innerText);
    if (!table.querySelector("td.text-right")) {
      // A long name may go on in the next line behind its dots, and a path behind its slashes.
      const ends = table.matches(".autosummary") ? /_/g : /[./,(=](?=\w)/g;
      for (const word of table.querySelectorAll("code .pre")) {
        if (!word.children.length) word.innerHTML = word.innerHTML.replace(ends, "$&<wbr>");
      }
    }
    if (names.length < 3) continue;
    if (table.querySelector("td.text-right")) {
      table.classList.add("numbers");
      continue;
    }
    table.classList.add("lists");
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, i) => i && names[i] && (cell.dataset.column = names[i]));
    }
  }
});
