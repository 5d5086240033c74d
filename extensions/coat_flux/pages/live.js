const token = decodeURIComponent(location.hash.slice(1));
const live = document.querySelector('main'), note = document.getElementById('note');
const buttons = [...document.querySelectorAll('button')];
const partsOf = page => [...page.querySelectorAll('main > section')].map(section => section.innerHTML);
let shown = partsOf(document);
function show(page) {
  const parts = partsOf(page);
  while (live.children.length < parts.length) live.append(document.createElement('section'));
  [...live.children].forEach((section, i) => {
    const part = parts[i] || '', folded = section.querySelector('details');
    if (part === (shown[i] || '')) return;
    section.innerHTML = part;
    if (folded && section.querySelector('details')) section.querySelector('details').open = folded.open;
  });
  shown = parts;
  document.title = page.title;
  for (const button of buttons) button.disabled = !token || page.getElementsByName(button.name)[0].disabled;
}
async function refresh() {
  try {
    const answer = await fetch(location.pathname);
    show(new DOMParser().parseFromString(await answer.text(), 'text/html'));
    if (note.dataset.lost) { note.textContent = ''; delete note.dataset.lost; }
  } catch {
    note.dataset.lost = '1';
    note.textContent = 'No answer: coat-flux watch, or the training it belongs to, has ended.';
    buttons.forEach(button => button.disabled = true);
  }
  setTimeout(refresh, 2000);
}
for (const button of buttons) button.addEventListener('click', async () => {
  button.disabled = true;
  const answer = await fetch('commands/' + button.name, {method: 'POST', headers: {'X-Coat-Token': token}});
  const text = note.textContent = await answer.text();
  setTimeout(() => { if (note.textContent === text) note.textContent = ''; }, 8000);
});
if (!token) note.textContent = 'Read only. The buttons need the whole address that coat-flux printed, with its # part.';
addEventListener('hashchange', () => location.reload());
show(document);
setTimeout(refresh, 2000);
